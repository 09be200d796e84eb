// Every function with CUDA kernels on the first GPU, against the CPU over the same bytes: shapes that fit nothing,
// batches with empty sequences, NaN in every slot of nobody, grids past 65535, used workspaces, graphs replayed with
// other batches, damaged tables, many threads and two processes that start cold. After every call all of device memory
// is compared, so that a write where none belongs shows.
//
//   gpu_tests [--quick | TEST...]    --quick: two of them;  exit status 0 all passed, 1 not, 77 no driver or no GPU
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "gpu.hpp"

using namespace gpu;
extern char **environ;

static int failures, checks;
static std::string where;

static bool check(bool ok, const std::string &what) {
    checks++;
    if (!ok && ++failures <= 40) printf("FAILED %s: %s\n", where.c_str(), what.c_str());
    return ok;
}

static pkv_error fresh_error() {
    pkv_error e = {};
    e.struct_size = sizeof e;
    return e;
}
static bool ok(pkv_status status, const pkv_error &e) {
    return check(status == PKV_OK, std::string(pkv_status_name(status)) + " about " + e.argument + ": " + e.message);
}

static std::vector<Shape> shapes() {
    const std::vector<std::pair<uint32_t, uint32_t>> mixed = {{0, 3},   {0, 0}, {5, 1}, {9, 0},
                                                              {20, 17}, {0, 1}, {31, 2}};
    return {
        {"bf16, fp8 cache with scales", PKV_BF16, PKV_F8_E4M3, PKV_F32, 128, 16, 4, 512, 64, 128, 128, 2, 128, 16, 128,
         20, PKV_MASK_CAUSAL, PKV_ROPE_INTERLEAVED, mixed},
        {"f16, page of 7, odd widths", PKV_F16, PKV_F16, 0, 0, 7, 3, 128, 10, 33, 45, 3, 20, 7, 40, 9,
         PKV_MASK_SLIDING_WINDOW_CAUSAL, PKV_ROPE_HALF_SPLIT, mixed},
        {"f32, page of 1, all keys", PKV_F32, PKV_F32, 0, 0, 1, 2, 256, 16, 24, 40, 1, 257, 3, 64, 300, PKV_MASK_NULL,
         PKV_ROPE_INTERLEAVED, mixed},
        {"bf16, fp8 cache, straddling groups", PKV_BF16, PKV_F8_E4M3, PKV_BF16, 48, 2, 5, 128, 64, 64, 64, 1, 64, 64,
         128, 64, PKV_MASK_CHUNKED_CAUSAL, PKV_ROPE_HALF_SPLIT, mixed},
        {"bf16, plain fp8 cache",
         PKV_BF16,
         PKV_F8_E4M3,
         0,
         0,
         64,
         1,
         512,
         64,
         128,
         128,
         4,
         64,
         2,
         32,
         1,
         PKV_MASK_CAUSAL,
         PKV_ROPE_INTERLEAVED,
         {{0, 70}}},
    };
}

// What a function writes, and how near it must come: 0 to the bit, else ‖have - want‖ / ‖want‖.
static double bound_of(const Scene &c, Op op, const Array *a) {
    const double near = c.s.dtype == PKV_F32 ? 1e-4 : c.s.dtype == PKV_F16 ? 2e-3 : 1e-2;
    if (op == PREFILL && (a == &c.output || a == &c.lse)) return near;
    if (op == MERGE && (a == &c.merged || a == &c.merged_lse)) return near;
    if ((op == PREFILL || op == ROPE) && (a == &c.mla || a == &c.mla_scales)) return near; // one sum in another order
    return 0;
}

// All of device memory against the CPU's.
static void compare(Scene &c, Op op) {
    for (Array *a : c.all()) {
        const std::vector<unsigned char> have = a->device->download();
        check(a->device->canaries_whole(), std::string(NAMES[op]) + " wrote outside its memory");
        if (have == a->host) continue;
        const double bound = bound_of(c, op, a);
        const size_t size = size_of(a->dtype);
        double error = 0, norm = 0;
        size_t first = ~size_t(0), count = 0;
        for (size_t i = 0; i < a->elements(); i++) {
            if (memcmp(&have[i * size], &a->host[i * size], size) == 0) {
                const double w = decode(&a->host[i * size], a->dtype);
                if (std::isfinite(w)) norm += w * w;
                continue;
            }
            const double h = decode(&have[i * size], a->dtype), w = decode(&a->host[i * size], a->dtype);
            if (std::isnan(h) && std::isnan(w)) continue;
            if (++count == 1) first = i;
            error += (h - w) * (h - w);
            norm += w * w;
        }
        const double off = count ? std::sqrt(error / std::max(norm, 1e-30)) : 0;
        if (count && !(off <= bound))
            check(false, std::string(NAMES[op]) + ": " + std::to_string(count) + " elements of " +
                             std::to_string(a->elements()) + " differ, the first is " + std::to_string(first) +
                             ", off by " + std::to_string(off));
    }
    checks++;
}

static std::vector<std::vector<unsigned char>> snapshot(Scene &c) {
    std::vector<std::vector<unsigned char>> all;
    for (Array *a : c.all()) all.push_back(a->device->download());
    return all;
}

static void run_both(Scene &c, Op op, pkv_stream stream = {nullptr}) {
    pkv_error e = fresh_error();
    ok(c.run(op, false, {nullptr}, {nullptr, 0}, &e), e);
    ok(c.run(op, true, stream, {nullptr, 0}, &e), e);
    synchronize();
}

static void every_function() {
    uint64_t seed = 0;
    for (const Shape &shape : shapes())
        for (int op = 0; op < OPS; op++) {
            where = std::string("every_function, ") + shape.name;
            Scene c(shape, ++seed, 0, op);
            run_both(c, Op(op));
            compare(c, Op(op));
        }
    Shape nothing = shapes()[0];
    for (auto sequences : {std::vector<std::pair<uint32_t, uint32_t>>{}, {{0, 0}}, {{5, 0}, {0, 0}}}) {
        where = "every_function, no new tokens";
        nothing.sequences = sequences;
        for (int op = 0; op < OPS; op++) {
            Scene c(nothing, ++seed, 1);
            if (op == MERGE) continue; // no batch
            run_both(c, Op(op));
            compare(c, Op(op));
        }
    }
}

// A grid dimension of 65535 is no limit, for tokens and for sequences.
static void many_rows() {
    const Shape small = {"", PKV_BF16,        PKV_F8_E4M3,          PKV_F32, 0, 16, 1, 128, 8, 8, 8, 1, 16, 1, 16,
                         2,  PKV_MASK_CAUSAL, PKV_ROPE_INTERLEAVED, {}};
    for (uint32_t tokens : {65535u, 65536u, 70000u}) {
        for (int op = 0; op < OPS; op++) {
            // On the emulation a block costs what a wave of them costs on a card.
            if (emulated() && (tokens != 65536 || op == PREFILL || op == INDEXER)) continue;
            where = "many_rows, " + std::to_string(tokens);
            Shape shape = small;
            if (op == PREFILL || op == INDEXER) { // many sequences: one long one would be quadratic
                for (uint32_t i = 0; i < tokens; i++) shape.sequences.push_back({i % 3, 1});
                shape.page = 4;
            } else {
                shape.sequences = {{0, 0}, {3, tokens - 1}, {0, 1}};
            }
            Scene c(shape, tokens + uint32_t(op), 0, op);
            run_both(c, Op(op));
            compare(c, Op(op));
        }
    }
}

// The queried size is enough, one byte less is refused, what lies in it does not matter, and nothing is written past
// it.
static void workspaces() {
    for (int op = 0; op < OPS; op++) {
        where = std::string("workspaces, ") + NAMES[op];
        Scene c(shapes()[0], 100 + uint64_t(op));
        size_t bytes = 0;
        pkv_error e = fresh_error();
        if (!ok(c.query(Op(op), true, &bytes, &e), e)) continue;
        std::vector<std::vector<unsigned char>> first;
        for (int dirt : {0, 0xff, 0x7e}) {
            Memory scratch(std::max<size_t>(bytes, 256));
            scratch.fill(uint8_t(dirt));
            c.upload();
            ok(c.run(Op(op), true, {nullptr}, {scratch.data(), bytes}, &e), e);
            synchronize();
            check(scratch.canaries_whole(), "the workspace is overrun");
            auto now = snapshot(c);
            if (first.empty()) first = now;
            check(now == first, "what lies in the workspace matters");
            if (bytes && dirt == 0) {
                c.upload();
                const auto before = snapshot(c);
                check(c.run(Op(op), true, {nullptr}, {scratch.data(), bytes - 1}, &e) == PKV_ERR_WORKSPACE,
                      "one byte less is taken");
                synchronize();
                check(snapshot(c) == before, "a refused call wrote");
            }
        }
    }
}

static void same_bits_every_run() {
    for (int op = 0; op < OPS; op++) {
        where = std::string("same_bits_every_run, ") + NAMES[op];
        Scene c(shapes()[3], 200 + uint64_t(op));
        std::vector<std::vector<unsigned char>> first;
        for (int i = 0; i < (emulated() ? 3 : 20); i++) {
            c.upload();
            pkv_error e = fresh_error();
            ok(c.run(Op(op), true, {nullptr}, {nullptr, 0}, &e), e);
            synchronize();
            auto now = snapshot(c);
            if (first.empty()) first = now;
            check(now == first, "other bits in another run");
        }
    }
}

// Captured once, replayed with fewer and with more rows in the same shapes, over a used workspace.
static void graphs() {
    for (int op = 0; op < OPS; op++) {
        where = std::string("graphs, ") + NAMES[op];
        Scene c(shapes()[0], 300 + uint64_t(op), 48);
        size_t bytes = 0;
        pkv_error e = fresh_error();
        ok(c.query(Op(op), true, &bytes, &e), e);
        Memory scratch(std::max<size_t>(bytes, 256));
        Stream stream;
        void *graph = nullptr, *ready = nullptr;
        must("cuStreamBeginCapture_v2", stream.native, 0);
        ok(c.run(Op(op), true, {stream.native}, {scratch.data(), bytes}, &e), e);
        must("cuStreamEndCapture", stream.native, &graph);
        must("cuGraphInstantiateWithFlags", &ready, graph, 0ull);
        std::vector<std::vector<std::pair<uint32_t, uint32_t>>> batches = {c.s.sequences};
        if (op != MERGE) {
            batches.push_back({{0, 1}, {0, 0}, {6, 0}, {2, 1}, {3, 2}, {0, 0}, {31, 0}});
            batches.push_back({{1, 2}, {0, 0}, {0, 6}, {0, 9}, {30, 7}, {0, 0}, {16, 17}});
            batches.push_back(std::vector<std::pair<uint32_t, uint32_t>>(7, {0, 0}));
            batches.push_back(c.s.sequences);
        }
        for (const auto &sequences : batches) {
            c.set_batch(sequences);
            ok(c.run(Op(op), false, {nullptr}, {nullptr, 0}, &e), e);
            must("cuGraphLaunch", ready, stream.native);
            must("cuStreamSynchronize", stream.native);
            compare(c, Op(op));
            for (Array *a : c.all()) { // the next batch starts from the same bytes on both sides
                const auto now = a->device->download();
                std::copy(now.begin(), now.end(), a->host.begin());
            }
        }
        check(scratch.canaries_whole(), "the workspace is overrun");
        must("cuGraphExecDestroy", ready);
        must("cuGraphDestroy", graph);
    }
}

// What only the device can see: nothing outside this layer's slots and the outputs is touched.
static void damaged_batches() {
    for (int op = 0; op < MERGE; op++) {
        where = std::string("damaged_batches, ") + NAMES[op];
        for (int fault = 0; fault < 6; fault++) {
            Scene c(shapes()[0], 400 + uint64_t(op));
            auto poke = [&](Array &a, size_t i, uint32_t x) { memcpy(&a.host[4 * i], &x, 4); };
            switch (fault) {
            case 0:
                for (size_t i = 0; i < c.table.elements(); i++) poke(c.table, i, i % 2 ? 0xffffffffu : c.blocks);
                break;
            case 1:
                for (size_t i = 0; i < c.lengths.elements(); i++) poke(c.lengths, i, i % 2 ? 0xfffffff0u : 1u << 31);
                break;
            case 2: // falling
                for (size_t i = 0; i < c.row_offsets.elements(); i++) poke(c.row_offsets, i, i % 2 ? 1000000 : 3);
                break;
            case 3:
                for (size_t i = 1; i < c.row_offsets.elements(); i++) poke(c.row_offsets, i, 0xfffffff0u);
                break;
            case 4:
                for (size_t i = 1; i < c.buffer_offsets.elements(); i++)
                    poke(c.buffer_offsets, i, i % 2 ? 0xfffffff0u : 2);
                break;
            default:
                for (Array *a : {&c.row_offsets, &c.lengths, &c.table, &c.buffer_offsets})
                    for (size_t i = 0; i < a->elements(); i++) poke(*a, i, 0xffffffffu);
            }
            c.upload();
            pkv_error e = fresh_error();
            ok(c.run(Op(op), true, {nullptr}, {nullptr, 0}, &e), e);
            synchronize();
            for (Array *a : c.all()) {
                check(a->device->canaries_whole(), "fault " + std::to_string(fault) + " wrote outside its memory");
                const bool written = (op == STORE && (a == &c.plain || a == &c.plain_scales)) ||
                                     (op == GATHER && a == &c.gathered) ||
                                     ((op == ROPE || op == PREFILL) && (a == &c.mla || a == &c.mla_scales)) ||
                                     (op == ROPE && a == &c.q_rope_out) ||
                                     (op == PREFILL && (a == &c.q || a == &c.output || a == &c.lse)) ||
                                     (op == INDEXER && (a == &c.indices || a == &c.scores));
                const auto have = a->device->download();
                if (!written) {
                    check(have == a->host, "fault " + std::to_string(fault) + " changed an input");
                } else if (a == &c.plain || a == &c.mla || a == &c.plain_scales ||
                           a == &c.mla_scales) { // other layers, and keys beside values
                    const size_t outer = a == &c.plain || a == &c.plain_scales ? 4 : 2, mine = outer - 1,
                                 part = have.size() / (c.blocks * outer);
                    bool clean = true;
                    for (size_t i = 0; i < size_t(c.blocks) * outer; i++)
                        clean = clean && (i % outer == mine || memcmp(&have[i * part], &a->host[i * part], part) == 0);
                    check(clean, "fault " + std::to_string(fault) + " wrote to another layer");
                }
            }
        }
    }
}

// What the host can see is refused, by name, with nothing written.
static void refusals() {
    struct Bad {
        Op op;
        pkv_status status;
        const char *argument;
        std::function<void(void *)> spoil;
    };
    auto of = [](auto member_of, auto change) {
        return [=](void *p) { change(*static_cast<decltype(member_of) *>(p)); };
    };
    const pkv_kv_store_params store = {};
    const pkv_kv_gather_params gather = {};
    const pkv_mla_rope_rmsnorm_quantize_params rope = {};
    const pkv_mla_prefill_fp8_params prefill = {};
    const pkv_mla_indexer_fp8_params indexer = {};
    const pkv_merge_attention_params merge = {};
    const std::vector<Bad> table = {
        {STORE, PKV_ERR_VALUE, "params.layer_idx", of(store, [](auto &p) { p.layer_idx = 2; })},
        {STORE, PKV_ERR_DTYPE, "params.values", of(store, [](auto &p) { p.values.dtype = PKV_I32; })},
        {STORE, PKV_ERR_SHAPE, "params.values", of(store, [](auto &p) { p.values.shape[2]++; })},
        {STORE, PKV_ERR_NULL, "params.values", of(store, [](auto &p) { p.values.data = nullptr; })},
        {GATHER, PKV_ERR_VALUE, "params.kv_idx", of(gather, [](auto &p) { p.kv_idx = 2; })},
        {GATHER, PKV_ERR_NULL, "params.buffer_row_offsets",
         of(gather, [](auto &p) { p.buffer_row_offsets = nullptr; })},
        {GATHER, PKV_ERR_SHAPE, "params.out", of(gather, [](auto &p) { p.out.shape[1]++; })},
        {ROPE, PKV_ERR_VALUE, "params.rope", of(rope, [](auto &p) { p.rope = 7; })},
        {ROPE, PKV_ERR_VALUE, "params.epsilon", of(rope, [](auto &p) { p.epsilon = -1; })},
        {ROPE, PKV_ERR_VALUE, "params.freqs_cis",
         of(rope, [](auto &p) { p.freqs_cis.shape[0] = 3; })}, // the batch may reach further
        {ROPE, PKV_ERR_SHAPE, "params.kv", of(rope, [](auto &p) { p.kv.shape[1]--; })},
        {PREFILL, PKV_ERR_VALUE, "params.mask", of(prefill, [](auto &p) { p.mask = 9; })},
        {PREFILL, PKV_ERR_VALUE, "params.scale", of(prefill, [](auto &p) { p.scale = INFINITY; })},
        {PREFILL, PKV_ERR_SHAPE, "params.kv_b_proj", of(prefill, [](auto &p) { p.kv_b_proj.shape[0]--; })},
        {PREFILL, PKV_ERR_SHAPE, "params.kv_b_proj_scale", of(prefill, [](auto &p) { p.kv_b_proj_scale.shape[1]++; })},
        {INDEXER, PKV_ERR_VALUE, "params.top_k", of(indexer, [](auto &p) { p.top_k = 0; })},
        {INDEXER, PKV_ERR_VALUE, "params.mask", of(indexer, [](auto &p) { p.mask = PKV_MASK_CHUNKED_CAUSAL; })},
        {INDEXER, PKV_ERR_DTYPE, "params.q_s", of(indexer, [](auto &p) { p.q_s.dtype = PKV_BF16; })},
        {MERGE, PKV_ERR_SHAPE, "params.lse_b", of(merge, [](auto &p) { p.lse_b.shape[1]++; })},
        {MERGE, PKV_ERR_DTYPE, "params.output_b", of(merge, [](auto &p) { p.output_b.dtype = PKV_F32; })},
    };
    Scene c(shapes()[0], 500);
    const auto before = snapshot(c);
    for (const Bad &bad : table) {
        where = std::string("refusals, ") + NAMES[bad.op] + " " + bad.argument;
        c.spoil = [&](Op, void *p) { bad.spoil(p); };
        pkv_error e = fresh_error();
        const pkv_status status = c.run(bad.op, true, {nullptr}, {nullptr, 0}, &e);
        synchronize();
        check(status == bad.status && strstr(e.argument, bad.argument),
              std::string("answers ") + pkv_status_name(status) + " about " + e.argument + ": " + e.message);
        check(snapshot(c) == before, "a refused call wrote");
    }
}

// Eight threads whose first calls meet, each with its own stream and batch.
static void threads() {
    where = "threads";
    std::vector<std::unique_ptr<Scene>> scenes;
    for (int i = 0; i < 8; i++) scenes.push_back(std::make_unique<Scene>(shapes()[0], 600 + uint64_t(i)));
    void *current = nullptr;
    must("cuCtxGetCurrent", &current);
    std::vector<std::thread> all;
    std::vector<pkv_error> errors(8, fresh_error());
    std::vector<int> faults(8);
    for (size_t i = 0; i < 8; i++)
        all.emplace_back([&, i] {
            must("cuCtxSetCurrent", current);
            Stream stream;
            for (int op = 0; op < OPS; op++)
                faults[i] +=
                    scenes[i]->run(Op((op + int(i)) % OPS), true, {stream.native}, {nullptr, 0}, &errors[i]) != PKV_OK;
            must("cuStreamSynchronize", stream.native);
        });
    for (auto &t : all) t.join();
    for (size_t i = 0; i < 8; i++) check(faults[i] == 0, errors[i].message);
    // Each did its own: the indexer's exact results say so.
    for (auto &scene : scenes) {
        pkv_error e = fresh_error();
        ok(scene->run(INDEXER, false, {nullptr}, {nullptr, 0}, &e), e);
        check(scene->indices.device->download() == scene->indices.host, "a thread's result is another's");
    }
}

// Two processes that start with the same empty cache of kernels.
static void processes(const char *self) {
    where = "processes";
    char cache[] = "/tmp/pagedkv-cache-XXXXXX";
    if (!mkdtemp(cache)) die("mkdtemp");
    setenv("PAGEDKV_CACHE_DIR", cache, 1);
    pid_t children[2];
    std::string program = self;
    for (pid_t &child : children) {
        char *const arguments[] = {&program[0], const_cast<char *>("same_bits_every_run"), nullptr};
        if (posix_spawn(&child, self, nullptr, nullptr, arguments, environ) != 0) die("posix_spawn");
    }
    for (pid_t child : children) {
        int status = 0;
        waitpid(child, &status, 0);
        check(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a process failed");
    }
    const std::string remove = std::string("rm -rf ") + cache;
    check(system(remove.c_str()) == 0, remove);
}

int main(int argc, char **argv) {
    std::vector<std::string> wanted;
    bool quick = false;
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--quick") == 0) quick = true;
        else wanted.push_back(argv[i]);
    const std::string device = open_device();
    setvbuf(stdout, nullptr, _IOLBF, 0);
    printf("device: %s\n%s\n", device.c_str(), pkv_build_info());
    // First what must meet cold kernels.
    const std::vector<std::pair<std::string, std::function<void()>>> tests = {
        {"threads", threads},
        {"every_function", every_function},
        {"refusals", refusals},
        {"workspaces", workspaces},
        {"graphs", graphs},
        {"damaged_batches", damaged_batches},
        {"same_bits_every_run", same_bits_every_run},
        {"many_rows", many_rows},
        {"processes", [&] { processes(argv[0]); }},
    };
    int ran = 0;
    for (const auto &[name, test] : tests) {
        const bool listed = std::find(wanted.begin(), wanted.end(), name) != wanted.end();
        if (quick ? name != "threads" && name != "refusals" : !wanted.empty() && !listed) continue;
        const int before = failures;
        test();
        synchronize();
        printf("%-6s %s\n", failures == before ? "ok" : "FAILED", name.c_str());
        ran++;
    }
    printf("%d tests, %d checks, %d failures\n", ran, checks, failures);
    return failures || !ran ? 1 : 0;
}
