// What this machine can do at most, measured in the same run as everything else: bytes read from memory, f32 multiply-adds, and 8-bit multiply-adds as
// AVX2 has them: vpmaddubsw + vpmaddwd + vpaddd, and with the sums of four vpmaddubsw kept in 16 bits before one vpmaddwd (which 4-bit codes allow).
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace bench {

inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Seconds of a core that this process has used, its own code's and the system's for it.
struct Used {
    double own, system;
};
inline Used used() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    auto seconds = [](timeval t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
    return {seconds(usage.ru_utime), seconds(usage.ru_stime)};
}

// Waits until no thread of this process computes any more: idle threads of a peer spin for a while after its last call (llama.cpp's for hundreds of
// milliseconds) and would halve whatever is timed next.
inline void settle() {
    auto all = [] {
        auto [own, system] = used();
        return own + system;
    };
    double before = all();
    for (int i = 0; i < 500; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        double after = all();
        if (after - before < 1e-3) return;
        before = after;
    }
}

// Work of all threads per second, the threads started together.
inline double rate(unsigned threads, const std::function<double(unsigned)>& work) {
    double best = 0;
    for (int round = 0; round < 3; round++) {
        std::vector<double> done(threads);
        double start = now();
        std::vector<std::thread> pool;
        for (unsigned t = 0; t < threads; t++) pool.emplace_back([&, t] { done[t] = work(t); });
        for (auto& thread : pool) thread.join();
        double seconds = now() - start, total = 0;
        for (double d : done) total += d;
        if (total / seconds > best) best = total / seconds;
    }
    return best;
}

struct Limits {
    double read = 0, fma = 0, maddubs = 0, maddubs4 = 0;  // bytes/s, operations/s
};

// Memory in huge pages where the system gives them, each page touched.
struct Memory {
    explicit Memory(std::size_t bytes) : size(bytes), data(static_cast<char*>(std::aligned_alloc(2u << 20, bytes)), &std::free) {
#if defined(__linux__)
        madvise(data.get(), size, MADV_HUGEPAGE);
#endif
        std::memset(data.get(), 1, size);
    }
    std::size_t size;
    std::unique_ptr<char, void (*)(void*)> data;
};

#if defined(__x86_64__)

// In four streams: a core has more reads under way so than in one.
__attribute__((target("avx2"))) inline double read_memory(const Memory& memory, unsigned part, unsigned parts) {
    constexpr std::size_t streams = 4, line = 64;
    std::size_t n = memory.size / parts / streams / line * line;
    const char* p = memory.data.get() + part * n * streams;
    __m256i sum[2 * streams] = {};
    for (std::size_t i = 0; i < n; i += line) {
#pragma GCC unroll 4
        for (std::size_t s = 0; s < streams; s++) {
            const char* at = p + s * n + i;
            sum[2 * s] = _mm256_xor_si256(sum[2 * s], _mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
            sum[2 * s + 1] = _mm256_xor_si256(sum[2 * s + 1], _mm256_load_si256(reinterpret_cast<const __m256i*>(at + 32)));
            _mm_prefetch(at + 1024, _MM_HINT_T0);
        }
    }
#pragma GCC unroll 8
    for (std::size_t j = 1; j < 2 * streams; j++) sum[0] = _mm256_xor_si256(sum[0], sum[j]);
    volatile std::int64_t keep = _mm256_extract_epi64(sum[0], 0);
    (void)keep;
    return static_cast<double>(n * streams);
}

__attribute__((target("avx2,fma"))) inline double run_fma() {
    constexpr long rounds = 6'000'000;
    __m256 x = _mm256_set1_ps(0.999f), y = _mm256_set1_ps(1e-6f), sum[10];
#pragma GCC unroll 16
    for (auto& s : sum) s = x;
    for (long i = 0; i < rounds; i++) {
#pragma GCC unroll 16
        for (auto& s : sum) s = _mm256_fmadd_ps(s, x, y);
#pragma GCC unroll 16
        for (auto& s : sum) __asm__ volatile("" : "+x"(s));
    }
    return rounds * 10.0 * 8 * 2;
}

__attribute__((target("avx2"))) inline double run_maddubs() {
    constexpr long rounds = 6'000'000;
    __m256i weight = _mm256_set1_epi8(3), activation = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1), sum[8] = {};
    for (long i = 0; i < rounds; i++)
#pragma GCC unroll 16
        for (auto& s : sum) {
            __asm__ volatile("" : "+x"(activation));
            s = _mm256_add_epi32(s, _mm256_madd_epi16(_mm256_maddubs_epi16(weight, activation), ones));
            __asm__ volatile("" : "+x"(s));
        }
    return rounds * 8.0 * 32 * 2;
}

__attribute__((target("avx2"))) inline double run_maddubs4() {
    constexpr long rounds = 2'000'000;
    __m256i weight = _mm256_set1_epi8(3), activation = _mm256_set1_epi8(5), ones = _mm256_set1_epi16(1), sum[8] = {};
    for (long i = 0; i < rounds; i++)
#pragma GCC unroll 16
        for (auto& s : sum) {
            __m256i partial = _mm256_setzero_si256();
#pragma GCC unroll 16
            for (int j = 0; j < 4; j++) {
                __asm__ volatile("" : "+x"(activation));
                partial = _mm256_add_epi16(partial, _mm256_maddubs_epi16(weight, activation));
                __asm__ volatile("" : "+x"(partial));
            }
            s = _mm256_add_epi32(s, _mm256_madd_epi16(partial, ones));
            __asm__ volatile("" : "+x"(s));
        }
    return rounds * 8.0 * 4 * 32 * 2;
}

inline Limits measure_limits(unsigned threads) {
    Limits limits;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return limits;
    Memory memory(256u << 20);
    limits.read = rate(threads, [&](unsigned t) { return read_memory(memory, t, threads); });
    limits.fma = rate(threads, [](unsigned) { return run_fma(); });
    limits.maddubs = rate(threads, [](unsigned) { return run_maddubs(); });
    limits.maddubs4 = rate(threads, [](unsigned) { return run_maddubs4(); });
    return limits;
}

#else

inline Limits measure_limits(unsigned) { return {}; }

#endif

}  // namespace bench
