// One row (a token and head) by one warp: load, store, quantise, dequantise, rope. Every lane of the warp takes part.
//
//   load_elements<T, N>(p, x)              N elements to f32; N * sizeof(T) = 16 or N small
//   store_elements<C, N>(p, x)             the way back, with the cast of from_f32
//   load_f32s<N>(base, dtype, index, x)    N elements of a run-time dtype
//   store_row<T>(cache, slot, head, row)   a row of T to its slot: cast, or quantised by groups with scales
//   load_cached<N>(cache, slot, c, x)      columns c .. c + N of a cached row (head 0), dequantised
//   rope_unit<T, N, VECTOR, HALF>(...)     the rotation of one lane's pairs
#pragma once
#include "device/batch.cuh"
#include "device/float.cuh"
#include "device/vector.cuh"
#include "device/warp.cuh"

// Moves `BYTES` at once where that is a size the machine moves (4, 8, 16 and multiples of it).
template <u32 BYTES> struct alignas(BYTES < 16 ? BYTES : 16) Bytes {
    u8 b[BYTES];
};

template <class T, u32 N> PKV_DEVICE void load_elements(const T *p, float (&x)[N]) {
    constexpr u32 bytes = N * sizeof(T);
    if constexpr (bytes % 16 == 0) {
        PKV_UNROLL
        for (u32 i = 0; i < bytes / 16; i++) {
            const Pack<T> pack = load16<T>(p + i * Pack<T>::size);
            PKV_UNROLL
            for (u32 j = 0; j < Pack<T>::size; j++) x[i * Pack<T>::size + j] = to_f32(pack.v[j]);
        }
    } else {
        union {
            uint2 raw;
            T v[8 / sizeof(T)];
        } u;
        if constexpr (bytes == 8) {
            u.raw = *reinterpret_cast<const uint2 *>(p);
        } else if constexpr (bytes == 4 && N > 1) {
            u.raw.x = *reinterpret_cast<const u32 *>(p);
        } else {
            PKV_UNROLL
            for (u32 j = 0; j < N; j++) u.v[j] = p[j];
        }
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) x[j] = to_f32(u.v[j]);
    }
}

template <class C, u32 N> PKV_DEVICE void store_elements(C *p, const float (&x)[N]) {
    constexpr u32 bytes = N * sizeof(C);
    if constexpr (N > 1 && bytes >= 4) {
        u32 words[bytes / 4];
        PKV_UNROLL
        for (u32 i = 0; i < bytes / 4; i++) {
            if constexpr (sizeof(C) == 4) words[i] = __float_as_uint(x[i]);
            else if constexpr (sizeof(C) == 2) words[i] = from_f32x2<C>(x[2 * i], x[2 * i + 1]);
            else words[i] = from_f32x2<C>(x[4 * i], x[4 * i + 1]) | from_f32x2<C>(x[4 * i + 2], x[4 * i + 3]) << 16;
        }
        if constexpr (bytes % 16 == 0) {
            PKV_UNROLL
            for (u32 i = 0; i < bytes / 16; i++)
                reinterpret_cast<uint4 *>(p)[i] =
                    uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
        } else if constexpr (bytes == 8) {
            *reinterpret_cast<uint2 *>(p) = uint2{words[0], words[1]};
        } else {
            *reinterpret_cast<u32 *>(p) = words[0];
        }
    } else {
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) p[j] = from_f32<C>(x[j]);
    }
}

template <u32 N, bool VECTOR> PKV_DEVICE void load_f32s(const void *base, i32 dtype, i64 index, float (&x)[N]) {
    if constexpr (VECTOR) {
        switch (dtype) {
        case DTYPE_F32: load_elements<float, N>(static_cast<const float *>(base) + index, x); return;
        case DTYPE_F16: load_elements<f16, N>(static_cast<const f16 *>(base) + index, x); return;
        default: load_elements<bf16, N>(static_cast<const bf16 *>(base) + index, x); return;
        }
    } else {
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) x[j] = load_as_f32(base, dtype, index + j);
    }
}

// ---- to the cache ----

// The scale of a group as it will be stored, from the largest finite magnitude in it.
template <class C> PKV_DEVICE float group_scale(float amax, i32 scale_dtype) {
    float s = __fdiv_rn(amax, fp8_max<C>());
    if (!(s >= 0x1p-126f)) s = 1.0f;
    if (scale_dtype == DTYPE_BF16) s = round_to<bf16>(s);
    if (scale_dtype == DTYPE_F8_E8M0) s = to_f32(e8m0_at_least(s));
    return s;
}

PKV_DEVICE void store_scale(void *scales, i32 scale_dtype, i64 index, float s) {
    switch (scale_dtype) {
    case DTYPE_F32: static_cast<float *>(scales)[index] = s; break;
    case DTYPE_BF16: static_cast<bf16 *>(scales)[index] = from_f32<bf16>(s); break;
    default: static_cast<e8m0 *>(scales)[index] = e8m0_at_least(s); break;
    }
}

// Naively: for each group, the largest finite magnitude, the scale, then code = cast(x / scale). Here as many groups go
// side by side as fit the warp: `lanes` lanes a group, a power of two, each taking N elements at a time. The second
// pass reads the row again (it is in L1, or in shared memory) rather than holding a row of unknown length in registers.
template <class T, class C, u32 N>
PKV_DEVICE void store_row_as(const CacheParams &cache, Slot slot, u32 head, const T *row) {
    C *to = static_cast<C *>(cache.blocks) + slot.blocks + i64(head) * cache.head_size;
    const u32 width = cache.head_size, lane = lane_id();
    if (cache.scales == nullptr) {
        for (u32 c = lane * N; c < width; c += WARP * N) {
            float x[N];
            load_elements<T, N>(row + c, x);
            store_elements<C, N>(to + c, x);
        }
        return;
    }
    if constexpr (sizeof(C) == 1) {
        const i64 scales = slot.scales + i64(head) * cache.groups;
        u32 lanes = 1;
        while (lanes < WARP && lanes * N < cache.granularity) lanes *= 2;
        const u32 mine = lane & (lanes - 1);
        for (u32 first = 0; first < cache.groups; first += WARP / lanes) {
            const u32 group = first + lane / lanes;
            const u32 begin = group < cache.groups ? group * cache.granularity : width;
            const u32 end = width - begin < cache.granularity ? width : begin + cache.granularity;
            float amax = 0.0f;
            for (u32 c = begin + mine * N; c < end; c += lanes * N) {
                float x[N];
                load_elements<T, N>(row + c, x);
                PKV_UNROLL
                for (u32 j = 0; j < N; j++) {
                    const float a = fabsf(x[j]);
                    if (a < f32_inf()) amax = fmaxf(amax, a);
                }
            }
            for (u32 step = lanes / 2; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(FULL_MASK, amax, step));
            const float s = group_scale<C>(amax, cache.scale_dtype);
            if (mine == 0 && group < cache.groups) store_scale(cache.scales, cache.scale_dtype, scales + group, s);
            for (u32 c = begin + mine * N; c < end; c += lanes * N) {
                float x[N];
                load_elements<T, N>(row + c, x);
                PKV_UNROLL
                for (u32 j = 0; j < N; j++) x[j] = __fdiv_rn(x[j], s);
                store_elements<C, N>(to + c, x);
            }
        }
    }
}

template <class T, u32 N> PKV_DEVICE void store_row(const CacheParams &cache, Slot slot, u32 head, const T *row) {
    switch (opaque(cache.dtype)) {
    case DTYPE_F32: store_row_as<T, float, N>(cache, slot, head, row); break;
    case DTYPE_F16: store_row_as<T, f16, N>(cache, slot, head, row); break;
    case DTYPE_BF16: store_row_as<T, bf16, N>(cache, slot, head, row); break;
    case DTYPE_F8_E4M3: store_row_as<T, e4m3, N>(cache, slot, head, row); break;
    case DTYPE_F8_E5M2: store_row_as<T, e5m2, N>(cache, slot, head, row); break;
    }
}

// ---- from the cache ----

// Columns c .. c + N of a cached row, times their scales. With N > 1 the host has seen to it that they share one scale.
template <class C, u32 N>
PKV_DEVICE void load_cached_as(const CacheParams &cache, Slot slot, u32 head, u32 c, float (&x)[N]) {
    load_elements<C, N>(static_cast<const C *>(cache.blocks) + slot.blocks + i64(head) * cache.head_size + c, x);
    if (cache.scales != nullptr) {
        const i64 index = slot.scales + i64(head) * cache.groups + c / cache.granularity;
        const float s = load_as_f32(cache.scales, cache.scale_dtype, index);
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) x[j] = __fmul_rn(x[j], s);
    }
}

template <u32 N> PKV_DEVICE void load_cached(const CacheParams &cache, Slot slot, u32 head, u32 c, float (&x)[N]) {
    switch (opaque(cache.dtype)) {
    case DTYPE_F32: load_cached_as<float, N>(cache, slot, head, c, x); break;
    case DTYPE_F16: load_cached_as<f16, N>(cache, slot, head, c, x); break;
    case DTYPE_BF16: load_cached_as<bf16, N>(cache, slot, head, c, x); break;
    case DTYPE_F8_E4M3: load_cached_as<e4m3, N>(cache, slot, head, c, x); break;
    default: load_cached_as<e5m2, N>(cache, slot, head, c, x); break;
    }
}

// ---- rope ----

// y0 = x0 cos - x1 sin, y1 = x0 sin + x1 cos, each product and sum rounded by itself.
PKV_DEVICE void rotate(float &x0, float &x1, float cosine, float sine) {
    const float y0 = __fsub_rn(__fmul_rn(x0, cosine), __fmul_rn(x1, sine));
    const float y1 = __fadd_rn(__fmul_rn(x0, sine), __fmul_rn(x1, cosine));
    x0 = y0;
    x1 = y1;
}

// The lanes share a row of `width` columns by units: 16 bytes of neighbouring pairs, or (half-split) 16 bytes and the
// 16 bytes half a row further; element by element, a unit is one pair.
template <u32 N, bool HALF> PKV_DEVICE u32 rope_units(u32 width) {
    return HALF ? width / 2 / N : width / (N == 1 ? 2 : N);
}

// `load(column, x)` fills x with consecutive elements from `column` on, `store(column, x)` takes them back.
template <u32 N, bool HALF, class Load, class Store> PKV_DEVICE void
rope_unit(u32 unit, u32 width, const void *freqs, i32 freqs_dtype, i64 freqs_row, Load load, Store store) {
    if constexpr (HALF) {
        const u32 c = unit * N;
        float lo[N], hi[N], f[2 * N];
        load(c, lo);
        load(c + width / 2, hi);
        load_f32s<2 * N, (N > 1)>(freqs, freqs_dtype, freqs_row + 2 * c, f);
        PKV_UNROLL
        for (u32 i = 0; i < N; i++) rotate(lo[i], hi[i], f[2 * i], f[2 * i + 1]);
        store(c, lo);
        store(c + width / 2, hi);
    } else {
        constexpr u32 W = N == 1 ? 2 : N;
        const u32 c = unit * W;
        float x[W], f[W];
        load(c, x);
        load_f32s<W, (N > 1)>(freqs, freqs_dtype, freqs_row + c, f);
        PKV_UNROLL
        for (u32 i = 0; i < W; i += 2) rotate(x[i], x[i + 1], f[i], f[i + 1]);
        store(c, x);
    }
}
