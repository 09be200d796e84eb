// limits.hpp as a library, for a benchmark that is not C++. Each function measures once, with so many threads: bytes or operations a second.
#include <cstring>
#include <memory>

#include "limits.hpp"

namespace {

constexpr std::size_t words = (128u << 20) / 8;

double once(unsigned threads, const std::function<double(unsigned)>& work) {
    std::vector<double> done(threads);
    std::vector<std::thread> pool;
    double start = bench::now(), total = 0;
    for (unsigned t = 1; t < threads; t++) pool.emplace_back([&, t] { done[t] = work(t); });
    done[0] = work(0);
    for (auto& thread : pool) thread.join();
    double seconds = bench::now() - start;
    for (double d : done) total += d;
    return total / seconds;
}

std::vector<std::uint64_t>& memory() {
    static std::vector<std::uint64_t> data(words, 1);
    return data;
}

}  // namespace

extern "C" double limit_fma(unsigned threads) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return once(threads, [](unsigned) { return bench::run_fma(); });
#endif
    (void)threads;
    return 0;
}

extern "C" double limit_read(unsigned threads) {
#if defined(__x86_64__)
    auto& data = memory();
    if (__builtin_cpu_supports("avx2")) return once(threads, [&](unsigned t) { return bench::read_memory(data, t, threads); });
#endif
    (void)threads;
    return 0;
}

// Bytes read plus bytes written.
extern "C" double limit_copy(unsigned threads) {
    auto& data = memory();
    std::size_t half = data.size() / 2, part = half / threads;
    return once(threads, [&](unsigned t) {
        std::memcpy(data.data() + half + t * part, data.data() + t * part, 8 * part);
        return 16.0 * static_cast<double>(part);
    });
}
