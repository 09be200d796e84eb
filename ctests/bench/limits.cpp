// limits.hpp as a library, for a benchmark that is not C++. Each function measures once, with so many threads: bytes or operations a second.
#include "limits.hpp"

namespace {

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

bench::Memory& memory() {
    static bench::Memory memory(128u << 20);
    return memory;
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
    const bench::Memory& data = memory();
    if (__builtin_cpu_supports("avx2")) return once(threads, [&](unsigned t) { return bench::read_memory(data, t, threads); });
#endif
    (void)threads;
    return 0;
}

// Bytes read plus bytes written.
extern "C" double limit_copy(unsigned threads) {
    std::size_t half = memory().size / 2, part = half / threads;
    char* data = memory().data.get();
    return once(threads, [&](unsigned t) {
        std::memcpy(data + half + t * part, data + t * part, part);
        return 2.0 * static_cast<double>(part);
    });
}
