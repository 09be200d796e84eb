// Tests of the emulation and of kernels/device/: conversions against plain searches, fragments against plain matrix
// products, meetings. `selftest` runs all; `selftest plant-X` runs one kernel with a planted fault that must end the
// process (build.py's `check` runs these under the sanitizer that has to see them).
#include "emu.h"
#include "device/async.cuh"
#include "device/batch.cuh"
#include "device/float.cuh"
#include "device/mma.cuh"
#include "device/vector.cuh"
#include "device/warp.cuh"
#include "device/wgmma.cuh"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

static int failures = 0;
#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition) && ++failures < 20) {                                                                         \
            printf("%s:%d: %s: ", __FILE__, __LINE__, #condition);                                                     \
            printf(__VA_ARGS__);                                                                                       \
            puts("");                                                                                                  \
        }                                                                                                              \
    } while (0)

// ---- conversions: decode from the definition of the format, encode by searching all values for the nearest ----

struct Format {
    int exponent_bits, mantissa_bits;
    bool infinities, saturate;
    double value(u32 code) const {
        const int bias = (1 << (exponent_bits - 1)) - 1;
        const u32 m = code & ((1u << mantissa_bits) - 1), e = code >> mantissa_bits & ((1u << exponent_bits) - 1);
        const u32 top = (1u << exponent_bits) - 1;
        const bool negative = code >> (mantissa_bits + exponent_bits) & 1;
        double v;
        if (infinities && e == top) v = m ? NAN : INFINITY;
        else if (!infinities && e == top && m == (1u << mantissa_bits) - 1) v = NAN;
        else if (e == 0) v = std::ldexp(double(m), 1 - bias - mantissa_bits);
        else v = std::ldexp(double(m + (1u << mantissa_bits)), int(e) - bias - mantissa_bits);
        return negative ? -v : v;
    }
    u32 magnitudes() const { return 1u << (mantissa_bits + exponent_bits); }
    u32 largest() const {
        u32 c = magnitudes() - 1;
        while (!std::isfinite(value(c))) c--;
        return c;
    }
    u32 nearest(float x) const {
        const u32 sign = std::signbit(x) ? magnitudes() : 0;
        const double a = std::fabs(double(x));
        const u32 last = largest();
        u32 lo = 0, hi = last;
        while (lo < hi) {
            const u32 mid = (lo + hi + 1) / 2;
            if (value(mid) <= a) lo = mid;
            else hi = mid - 1;
        }
        if (lo == last) {
            const double step = value(last) - value(last - 1);
            return sign | (saturate || a < value(last) + step / 2 ? last : last + 1);
        }
        const double down = a - value(lo), up = value(lo + 1) - a;
        return sign | (down < up || (down == up && lo % 2 == 0) ? lo : lo + 1);
    }
};

template <class T> static void check_format(const char *name, Format format) {
    const u32 codes = 2 * format.magnitudes();
    std::vector<float> samples = {0.0f,  -0.0f,  INFINITY, -INFINITY, 1e-45f,   -1e-45f,
                                  3e38f, 1e-30f, 70000.0f, 65519.0f,  65520.0f, 480.0f};
    for (u32 c = 0; c < codes; c++) {
        T t;
        t.bits = decltype(t.bits)(c);
        const float got = to_f32(t);
        const double want = format.value(c);
        CHECK(std::isnan(want) ? std::isnan(got) : double(got) == want && std::signbit(got) == std::signbit(want),
              "%s decode %x: %g %g", name, c, got, want);
        if (std::isfinite(want) && codes <= 65536) {
            const u32 bits = __float_as_uint(float(want));
            for (i64 d = -2; d <= 2; d++) samples.push_back(__uint_as_float(bits + u32(d)));
            if (std::isfinite(format.value(c + 1))) {
                const float middle = float((want + format.value(c + 1)) / 2);
                for (i64 d = -1; d <= 1; d++) samples.push_back(__uint_as_float(__float_as_uint(middle) + u32(d)));
            }
        }
    }
    std::mt19937 random(7);
    for (int i = 0; i < 20000; i++) samples.push_back(__uint_as_float(random()));
    for (float x : samples) {
        const u32 got = from_f32<T>(x).bits;
        if (std::isnan(x)) {
            CHECK(std::isnan(format.value(got)), "%s NaN gives %x", name, got);
        } else {
            CHECK(got == format.nearest(x), "%s encode %.9g: %x, nearest %x", name, x, got, format.nearest(x));
        }
    }
}

static void conversions() {
    check_format<f16>("f16", {5, 10, true, false});
    check_format<bf16>("bf16", {8, 7, true, false});
    check_format<e4m3>("e4m3", {4, 3, false, true});
    check_format<e5m2>("e5m2", {5, 2, true, true});
    for (u32 c = 0; c < 255; c++) CHECK(to_f32(e8m0{u8(c)}) == std::ldexp(1.0f, int(c) - 127), "e8m0 %u", c);
    std::mt19937 random(9);
    for (int i = 0; i < 10000; i++) {
        const float s = __uint_as_float(random() & 0x7fffffff);
        if (!std::isfinite(s)) continue;
        const double got = to_f32(e8m0_at_least(s));
        const double want =
            std::min(std::max(std::exp2(std::ceil(std::log2(double(s)))), std::ldexp(1.0, -126)), std::ldexp(1.0, 127));
        CHECK(got == want, "e8m0_at_least(%g) = %g, want %g", s, got, want);
    }
    for (u32 c = 0; c < 65536; c++) {
        float lo, hi;
        to_f32x2<e4m3>(c, lo, hi);
        const float a = to_f32(e4m3{u8(c)}), b = to_f32(e4m3{u8(c >> 8)});
        CHECK((lo == a || a != a) && (hi == b || b != b), "e4m3 pair %x", c);
    }
}

// ---- tensor cores ----

struct MmaParams {
    const void *a, *b; // [16, K], [8, K] (B transposed: column n contiguous)
    float *d;          // [16, 8]
    i32 mode;          // 0 plain fragment loads, 1 ldmatrix, 2 ldmatrix with B in row-major [K, 8] and .trans
};

template <class T> PKV_DEVICE void mma16(const MmaParams &p) {
    __shared__ __align__(16) u16 sa[16][24];
    __shared__ __align__(16) u16 sb[8][24];
    __shared__ __align__(16) u16 sbt[16][8];
    const u16 *a = static_cast<const u16 *>(p.a), *b = static_cast<const u16 *>(p.b);
    const u32 lane = lane_id(), g = lane / 4, t = lane % 4;
    for (u32 i = lane; i < 256; i += 32) sa[i / 16][i % 16] = a[i];
    for (u32 i = lane; i < 128; i += 32) {
        sb[i / 16][i % 16] = b[i];
        sbt[i % 16][i / 16] = b[i];
    }
    __syncwarp();
    u32 fa[4], fb[2];
    if (p.mode == 0) {
        for (u32 i = 0; i < 4; i++) {
            const u32 row = g + 8 * (i & 1), column = 2 * t + 8 * (i >> 1);
            fa[i] = u32(sa[row][column + 1]) << 16 | sa[row][column];
        }
        for (u32 i = 0; i < 2; i++) fb[i] = u32(sb[g][2 * t + 8 * i + 1]) << 16 | sb[g][2 * t + 8 * i];
    } else {
        ldmatrix_x4(fa, &sa[lane % 16][8 * (lane / 16)]);
        if (p.mode == 1) ldmatrix_x2(fb, &sb[lane % 8][8 * (lane / 8 % 2)]);
        else ldmatrix_x2_trans(fb, &sbt[lane % 16][0]);
    }
    float d[4] = {p.d[g * 8 + 2 * t], p.d[g * 8 + 2 * t + 1], p.d[(g + 8) * 8 + 2 * t], p.d[(g + 8) * 8 + 2 * t + 1]};
    mma_m16n8k16<T>(d, fa, fb);
    for (u32 i = 0; i < 4; i++) p.d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = d[i];
}
PKV_KERNEL(test_mma_bf16, MmaParams, 32, 1) { mma16<bf16>(p); }
PKV_KERNEL(test_mma_f16, MmaParams, 32, 1) { mma16<f16>(p); }
PKV_KERNEL(test_mma_e4m3, MmaParams, 32, 1) {
    const u8 *a = static_cast<const u8 *>(p.a), *b = static_cast<const u8 *>(p.b);
    const u32 lane = lane_id(), g = lane / 4, t = lane % 4;
    auto four = [](const u8 *x) { return u32(x[0]) | u32(x[1]) << 8 | u32(x[2]) << 16 | u32(x[3]) << 24; };
    u32 fa[4], fb[2];
    for (u32 i = 0; i < 4; i++) fa[i] = four(a + (g + 8 * (i & 1)) * 32 + 4 * t + 16 * (i >> 1));
    for (u32 i = 0; i < 2; i++) fb[i] = four(b + g * 32 + 4 * t + 16 * i);
    float d[4] = {};
    if (p.mode == 0) mma_m16n8k32_e4m3(d, fa, fb);
    else mma_m16n8k32_e4m3_exact(d, fa, fb);
    for (u32 i = 0; i < 4; i++) p.d[(g + 8 * (i >> 1)) * 8 + 2 * t + (i & 1)] = d[i];
}

template <class T> static void check_mma(const char *kernel, u32 K, i32 modes) {
    std::mt19937 random(3);
    for (i32 mode = 0; mode < modes; mode++) {
        std::vector<T> a(16 * K), b(8 * K);
        // Small integers: every order of additions gives the same exact sum.
        for (auto &x : a) x = from_f32<T>(float(int(random() % 9) - 4));
        for (auto &x : b) x = from_f32<T>(float(int(random() % 9) - 4));
        std::vector<float> d(128);
        if (K == 16)
            for (auto &x : d) x = float(random() % 100);
        const std::vector<float> c = d;
        pkv_emu::launch(kernel, {1, 1, 1}, 32, 0, MmaParams{a.data(), b.data(), d.data(), mode});
        for (u32 r = 0; r < 16; r++)
            for (u32 n = 0; n < 8; n++) {
                double want = c[r * 8 + n];
                for (u32 k = 0; k < K; k++) want += double(to_f32(a[r * K + k])) * to_f32(b[n * K + k]);
                CHECK(d[r * 8 + n] == want, "%s mode %d [%u][%u]: %g, want %g", kernel, mode, r, n, d[r * 8 + n], want);
            }
    }
}

// ---- wgmma, mbarrier ----

enum WgmmaForm : i32 { E4M3_TILES, F16_TILES, F16_REGISTERS, BF16_N_MAJOR };
// What a kernel can do wrong.
enum WgmmaFault : i32 {
    RIGHT,
    NOT_SWIZZLED,
    STRIDE_WRONG,
    READ_BEFORE_WAIT,
    OVERWRITTEN_BEFORE_WAIT,
    FILLED_AFTER_COMMIT,
    NO_WGMMA_FENCE,
    NO_PROXY_FENCE,
    THREADS_DIFFER
};
struct WgmmaParams {
    const u8 *a, *b; // [64][K], [N][K] (n-major: [K][N]), rows one after another
    float *d;        // [64][N]
    i32 form, fault;
};

// Rows of 128 bytes to a swizzled tile, by 128 threads.
static void fill_tile(u8 *tile, const u8 *from, u32 row_bytes, u32 rows, i32 fault) {
    for (u32 i = threadIdx.x; i < rows * 8; i += 128) {
        const u32 row = i / 8, byte = i % 8 * 16, at = fault == NOT_SWIZZLED ? row * 128 + byte : swizzle_128(row, byte);
        cp_async_16(tile + at, from + i64(row) * row_bytes + byte);
    }
    cp_async_commit();
    cp_async_wait<0>();
    if (fault != NO_PROXY_FENCE) fence_async_proxy();
}

PKV_KERNEL(test_wgmma, WgmmaParams, 128, 1) {
    PKV_DYNAMIC_SHARED(u8, a);
    u8 *b = a + 8192;
    const bool n_major_b = p.form == BF16_N_MAJOR;
    const u32 N = p.form == F16_REGISTERS ? 64 : 128;
    auto fill = [&] {
        if (n_major_b) // 32 rows of k, twice 64 columns
            for (u32 half = 0; half < 2; half++) fill_tile(b + 4096 * half, p.b + 128 * half, 256, 32, p.fault);
        else fill_tile(b, p.b, 128, N, p.fault);
        if (p.form == E4M3_TILES || p.form == F16_TILES) fill_tile(a, p.a, 128, 64, p.fault);
        __syncthreads();
    };
    if (p.fault != FILLED_AFTER_COMMIT) fill();
    float d64[32] = {}, d128[64] = {};
    for (float &x : d64) x = 3.0f;
    for (float &x : d128) x = 3.0f;
    const u64 wrong = p.fault == STRIDE_WRONG ? u64(64) << 32 : 0; // a stride of 2048
    const u32 steps = n_major_b ? 2 : 4;
    if (p.fault != NO_WGMMA_FENCE) wgmma_fence();
    for (u32 step = 0; step < steps; step++) {
        u32 registers[4];
        const u32 row_bytes = n_major_b ? 64 : 128;
        for (u32 i = 0; i < 4; i++) {
            const u32 row = threadIdx.x / 32 * 16 + lane_id() / 4 + 8 * (i % 2), byte = i / 2 * 16 + lane_id() % 4 * 4;
            registers[i] = *reinterpret_cast<const u32 *>(p.a + row * row_bytes + 32 * step + byte);
        }
        const u32 add = step > 0 || (p.fault == THREADS_DIFFER && threadIdx.x == 77);
        switch (p.form) {
        case E4M3_TILES:
            wgmma_m64n128k32_e4m3(d128, k_major(a + 32 * step), k_major(b + 32 * step) ^ wrong, add);
            break;
        case F16_TILES:
            wgmma_m64n128k16<f16>(d128, k_major(a + 32 * step), k_major(b + 32 * step) ^ wrong, add);
            break;
        case F16_REGISTERS: wgmma_m64n64k16<f16>(d64, registers, k_major(b + 32 * step) ^ wrong, add); break;
        default: wgmma_m64n128k16_n_major<bf16>(d128, registers, n_major(b + 2048 * step, 4096) ^ wrong, add);
        }
    }
    wgmma_commit();
    auto store = [&] {
        for (u32 i = 0; i < N / 2; i++) {
            const u32 row = threadIdx.x / 32 * 16 + lane_id() / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane_id() % 4 * 2;
            p.d[row * N + column + i % 2] = N == 128 ? d128[i] : d64[i];
        }
    };
    if (p.fault == FILLED_AFTER_COMMIT) fill();
    if (p.fault == READ_BEFORE_WAIT) store();
    if (p.fault == OVERWRITTEN_BEFORE_WAIT) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < 16384; i += 128) b[i] = 0;
    }
    wgmma_wait<0>();
    if (p.fault != READ_BEFORE_WAIT) store();
}

static bool wgmma_is_right(i32 form, i32 fault) {
    const bool n_major_b = form == BF16_N_MAJOR;
    const u32 size = form == E4M3_TILES ? 1 : 2, N = form == F16_REGISTERS ? 64 : 128;
    const u32 K = n_major_b ? 32 : 128 / size;
    std::mt19937 random(5);
    std::vector<float> a(64 * K), b(N * K), d(64 * N);
    std::vector<u64> a_storage(64 * K * size / 8), b_storage(N * K * size / 8);
    u8 *a_bytes = reinterpret_cast<u8 *>(a_storage.data()), *b_bytes = reinterpret_cast<u8 *>(b_storage.data());
    auto put = [&](u8 *at, size_t i, float x) {
        if (form == E4M3_TILES) at[i] = from_f32<e4m3>(x).bits;
        else reinterpret_cast<u16 *>(at)[i] = form == BF16_N_MAJOR ? from_f32<bf16>(x).bits : from_f32<f16>(x).bits;
    };
    for (size_t i = 0; i < a.size(); i++) put(a_bytes, i, a[i] = float(int(random() % 9) - 4));
    for (u32 n = 0; n < N; n++)
        for (u32 k = 0; k < K; k++) put(b_bytes, n_major_b ? k * N + n : n * K + k, b[n * K + k] = float(int(random() % 9) - 4));
    pkv_emu::launch("test_wgmma", {1, 1, 1}, 128, 8192 + 16384, WgmmaParams{a_bytes, b_bytes, d.data(), form, fault});
    for (u32 row = 0; row < 64; row++)
        for (u32 n = 0; n < N; n++) {
            float want = 0;
            for (u32 k = 0; k < K; k++) want += a[row * K + k] * b[n * K + k];
            if (d[row * N + n] != want) return false;
        }
    return true;
}

[[maybe_unused]] static void wgmmas() {
    const char *reverse = getenv("PKV_EMU_REVERSE");
    const bool early = reverse && *reverse == '1'; // when operands are read
    for (const i32 form : {E4M3_TILES, F16_TILES, F16_REGISTERS, BF16_N_MAJOR}) {
        CHECK(wgmma_is_right(form, RIGHT), "wgmma, form %d", form);
        for (const i32 fault : {NOT_SWIZZLED, STRIDE_WRONG, READ_BEFORE_WAIT})
            CHECK(!wgmma_is_right(form, fault), "wgmma, form %d: fault %d is not seen", form, fault);
        CHECK(wgmma_is_right(form, OVERWRITTEN_BEFORE_WAIT) == early, "wgmma, form %d: overwritten early", form);
        CHECK(wgmma_is_right(form, FILLED_AFTER_COMMIT) == !early, "wgmma, form %d: filled late", form);
    }
}

// A ring of four words: the first warp fills, the second takes, each waits for the other.
struct RingParams {
    u32 *sums; // [32]
    i32 fault; // 1: taken without waiting, 2: a barrier nobody initialised
};
PKV_KERNEL(test_ring, RingParams, 64, 1) {
    PKV_DYNAMIC_SHARED(u64, bars);
    u64 *full = bars, *empty = bars + 4;
    u32 *ring = reinterpret_cast<u32 *>(bars + 8);
    if (threadIdx.x < 4) {
        if (p.fault != 2) mbarrier_init(full + threadIdx.x, 32);
        mbarrier_init(empty + threadIdx.x, 1);
    }
    __syncthreads();
    u32 sum = 0;
    for (u32 step = 0; step < 103; step++) {
        const u32 slot = step % 4, parity = step / 4 & 1;
        if (warp_id() == 0) {
            mbarrier_wait(empty + slot, parity ^ 1);
            ring[32 * slot + lane_id()] = step * lane_id();
            mbarrier_arrive(full + slot);
        } else {
            if (p.fault != 1) mbarrier_wait(full + slot, parity);
            sum += ring[32 * slot + (lane_id() + 1) % 32];
            __syncwarp();
            if (lane_id() == 0) mbarrier_arrive(empty + slot);
        }
    }
    if (warp_id() == 1) {
        named_barrier(3, 32);
        p.sums[lane_id()] = sum;
    }
}
static bool ring_is_right(i32 fault) {
    std::vector<u32> sums(32);
    pkv_emu::launch("test_ring", {1, 1, 1}, 64, 64 + 512, RingParams{sums.data(), fault});
    bool right = true;
    for (u32 i = 0; i < 32; i++) right = right && sums[i] == 102 * 103 / 2 * ((i + 1) % 32);
    return right;
}

// ---- meetings, reductions, grids ----

struct MeetParams {
    float *sums; // [gridDim.x]
    u32 *counts; // [gridDim.x]
    u32 *total;
    u32 threads;
};
static float block_sum(float x, float *scratch) {
    x = warp_sum(x);
    __syncthreads();
    if (lane_id() == 0) scratch[warp_id()] = x;
    __syncthreads();
    float sum = 0;
    for (u32 i = 0; i < blockDim.x / WARP; i++) sum += scratch[i];
    return sum;
}
PKV_KERNEL(test_meet, MeetParams, 256, 1) {
    __shared__ float scratch[8];
    PKV_DYNAMIC_SHARED(u32, tile);
    if (!(__uint_as_float(tile[threadIdx.x]) != __uint_as_float(tile[threadIdx.x]))) __trap(); // starts as NaN
    __syncthreads();
    tile[threadIdx.x] = threadIdx.x;
    __syncthreads();
    const float x = float(tile[255 - threadIdx.x]);
    const float sum = block_sum(x, scratch);
    const u32 count = u32(__syncthreads_count(threadIdx.x % 3 == 0));
    const u32 ballot = __ballot_sync(FULL_MASK, lane_id() < 5);
    const u32 up = __shfl_up_sync(FULL_MASK, threadIdx.x, 1), same = __match_any_sync(FULL_MASK, lane_id() / 8);
    if (ballot != 31 || up != (lane_id() ? threadIdx.x - 1 : threadIdx.x) || same != 0xffu << lane_id() / 8 * 8)
        __trap();
    if (lane_id() >= 16) { // half a warp meets alone
        if (__shfl_xor_sync(0xffff0000u, lane_id(), 1) != (lane_id() ^ 1)) __trap();
    }
    atomicAdd(p.total, 1u);
    if (threadIdx.x >= 128) return; // barriers go on without the threads that returned
    __syncthreads();
    if (threadIdx.x == 0) {
        p.sums[blockIdx.x] = sum;
        p.counts[blockIdx.x] = count;
    }
}

struct CopyParams {
    const u32 *from;
    u32 *to;
    i32 wait;
};
PKV_KERNEL(test_copy, CopyParams, 64, 1) {
    PKV_DYNAMIC_SHARED(u32, tile);
    cp_async_16(tile + 4 * threadIdx.x, p.from + 4 * threadIdx.x, threadIdx.x % 2 == 0);
    cp_async_commit();
    if (p.wait) cp_async_wait<0>();
    __syncthreads();
    store16(p.to + 4 * threadIdx.x, load16<u32>(tile + 4 * (threadIdx.x ^ 2)));
    cp_async_wait<0>();
}

static void meetings() {
    const u32 blocks = 70000;
    std::vector<float> sums(blocks);
    std::vector<u32> counts(blocks);
    u32 total = 0;
    pkv_emu::launch("test_meet", {300, 1, 1}, 256, 1024, MeetParams{sums.data(), counts.data(), &total, 256});
    for (u32 i = 0; i < 300; i++)
        CHECK(sums[i] == 255 * 128 && counts[i] == 86, "block %u: %g %u", i, sums[i], counts[i]);
    CHECK(total == 300 * 256, "%u", total);
#ifdef PKV_EMU_TSAN
    const i32 first = 1; // without the wait it is a race
#else
    const i32 first = 0;
#endif
    for (i32 wait = first; wait < 2; wait++) {
        alignas(16) u32 from[256], to[256];
        for (u32 i = 0; i < 256; i++) from[i] = i;
        pkv_emu::launch("test_copy", {1, 1, 1}, 64, 1024, CopyParams{from, to, wait});
        u32 wrong = 0;
        for (u32 i = 0; i < 256; i++) wrong += to[i] != ((i / 4) % 2 == 0 ? i ^ 8 : 0);
        const char *reverse = getenv("PKV_EMU_REVERSE");
        const bool early = !reverse || *reverse != '1'; // when copies are made
        CHECK((wrong == 0) == (wait != 0 || early), "cp.async wait %d: %u wrong", wait, wrong);
    }
}

struct PlaceParams {
    BatchParams batch;
    u32 *sequences;
    u64 *positions;
};
PKV_KERNEL(test_place, PlaceParams, 64, 1) {
    const u64 token = u64(blockIdx.x) * blockDim.x + threadIdx.x;
    TokenPlace place{~0u, ~0ull};
    find_token(p.batch, token, place);
    if (token < 64) {
        p.sequences[token] = place.sequence;
        p.positions[token] = place.position;
    }
}
static void places() {
    const u32 offsets[] = {0, 0, 3, 3, 3, 10, 40, 40}, lengths[] = {9, 5, 8, 7, 100, 0, 4};
    u32 sequences[64];
    u64 positions[64];
    pkv_emu::launch("test_place", {1, 1, 1}, 64, 0,
                    PlaceParams{{offsets, lengths, nullptr, 0, 7, 0}, sequences, positions});
    for (u32 t = 0; t < 64; t++) {
        u32 b = 0;
        while (b < 7 && !(offsets[b] <= t && t < offsets[b + 1])) b++;
        CHECK(b < 7 ? sequences[t] == b && positions[t] == lengths[b] + t - offsets[b] : sequences[t] == ~0u,
              "token %u", t);
    }
}

// ---- planted faults ----

struct PlantParams {
    u32 *data; // [64]
    i32 fault;
};
PKV_KERNEL(test_plant, PlantParams, 64, 1) {
    PKV_DYNAMIC_SHARED(u32, tile);
    tile[threadIdx.x] = threadIdx.x;
    if (p.fault != 0) __syncthreads();
    const u32 x = tile[(threadIdx.x + 33) % 64]; // races where the barrier was left out
    if (p.fault == 1 && threadIdx.x == 63) p.data[64] = x;
    if (p.fault == 2 && lane_id() >= 16) __syncwarp();
    if (p.fault == 2 && lane_id() < 16) __shfl_sync(FULL_MASK, x, 0);
    if (p.fault == 3 && (threadIdx.x & 1)) return;
    if (p.fault == 3) __syncwarp();
    if (p.fault == 6) tile[threadIdx.x + 1] = x;
    if (p.fault == 4) {
        __shared__ __align__(16) u16 rows[8][64];
        u32 r[2];
        ldmatrix_x2(r, rows[lane_id() % 8]);
    }
    p.data[threadIdx.x] = x;
}
static void plant(i32 fault) {
    u32 *data = new u32[64];
    pkv_emu::launch("test_plant", {1, 1, 1}, 64, 256, PlantParams{data, fault});
    delete[] data;
}

int main(int argc, char **argv) {
    const std::string what = argc > 1 ? argv[1] : "";
    if (what == "plant-race") plant(0);
    else if (what == "plant-bounds") plant(1);
    else if (what == "plant-mixed-meetings") plant(2);
    else if (what == "plant-missing-lane") plant(3);
    else if (what == "plant-bank-conflict") plant(4);
    else if (what == "plant-shared-bounds") plant(6);
    else if (what == "plant-wgmma-without-fence") wgmma_is_right(F16_TILES, NO_WGMMA_FENCE);
    else if (what == "plant-tile-without-proxy-fence") wgmma_is_right(E4M3_TILES, NO_PROXY_FENCE);
    else if (what == "plant-warpgroup-differs") wgmma_is_right(F16_REGISTERS, THREADS_DIFFER);
    else if (what == "plant-tile-overwritten") wgmma_is_right(F16_TILES, OVERWRITTEN_BEFORE_WAIT);
    else if (what == "plant-ring-not-waited-for") ring_is_right(1);
    else if (what == "plant-mbarrier-not-initialised") ring_is_right(2);
    else if (what == "plant-nothing") plant(5);
    else {
        conversions();
        check_mma<bf16>("test_mma_bf16", 16, 3);
        check_mma<f16>("test_mma_f16", 16, 3);
        check_mma<e4m3>("test_mma_e4m3", 32, 2);
#ifndef PKV_EMU_TSAN // where their faults are races
        wgmmas();
#endif
        CHECK(ring_is_right(0), "ring");
        meetings();
        places();
        printf(failures ? "%d failures\n" : "ok\n", failures);
        return failures != 0;
    }
}
