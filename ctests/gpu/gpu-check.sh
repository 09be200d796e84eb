#!/bin/sh
# Tests and times pagedkv's CUDA kernels on this machine. Needs an NVIDIA driver and what lies in this folder; uses
# compute-sanitizer and a Python with PyTorch where they are installed.
#
#   ./gpu-check.sh            at most ten minutes; writes record.json and prints the table
#   ./gpu-check.sh --tiny     small shapes
#
# Exit status: 0 all that ran is right, 1 not, 77 no driver or no GPU.
cd "$(dirname "$0")" || exit 1
tiny=$1
status=0
within() { # SECONDS COMMAND...
    if command -v timeout >/dev/null; then timeout "$@"; else shift && "$@"; fi
}
verdict() {
    case $1 in
    0) echo passed ;;
    124) echo "did not end in time" ;;
    *) echo "failed ($1)" ;;
    esac
}
rm -f bench.json peers.json record.json

echo "== every function on one small batch"
within 60 ./gpu_check
code=$?
[ $code = 77 ] && exit 77
small=$(verdict $code)
[ $code = 0 ] || status=1

echo "== shapes, graphs, workspaces, damaged batches, threads"
within 200 ./gpu_tests ${tiny:+--quick}
code=$?
tests=$(verdict $code)
[ $code = 0 ] || status=1

echo "== the same with the kernels for Hopper alone"
hopper="not this card"
within 60 ./gpu_tests --hopper
code=$?
if [ $code != 77 ]; then
    hopper=$(verdict $code)
    [ $code = 0 ] || status=1
fi

echo "== times"
# shellcheck disable=SC2086 -- the argument or none
within 180 ./gpu_bench bench.json $tiny
code=$?
times=$(verdict $code)
[ $code = 0 ] || status=1

echo "== peers"
if command -v python3 >/dev/null; then within 90 python3 peers.py peers.json; else echo "no python3: left out"; fi

memory="not installed"
races="not installed"
for sanitizer in compute-sanitizer /usr/local/cuda/bin/compute-sanitizer; do
    command -v "$sanitizer" >/dev/null || continue
    echo "== compute-sanitizer"
    within 60 "$sanitizer" --error-exitcode 9 --tool memcheck ./gpu_check && within 60 "$sanitizer" --error-exitcode 9 --tool memcheck ./gpu_tests damaged_batches
    code=$?
    memory=$(verdict $code)
    [ $code = 0 ] || [ $code = 124 ] || status=1
    within 60 "$sanitizer" --error-exitcode 9 --tool racecheck ./gpu_tests every_kernel
    code=$?
    races=$(verdict $code)
    [ $code = 0 ] || [ $code = 124 ] || status=1
    break
done

json() { # a file's contents, or null
    if [ -s "$1" ]; then cat "$1"; else echo null; fi
}
driver=$(command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
cat >record.json <<END
{
"date": "$(date -u +%Y-%m-%dT%H:%M:%SZ)", "driver": "$driver", "tiny": "$tiny",
"gpu_check": "$small", "gpu_tests": "$tests", "gpu_tests_hopper": "$hopper", "gpu_bench": "$times",
"memcheck": "$memory", "racecheck": "$races",
"times": $(json bench.json),
"peers": $(json peers.json)
}
END
echo
echo "tests: $small, $tests; Hopper kernels: $hopper; times: $times; memcheck: $memory; racecheck: $races; record.json written"
exit $status
