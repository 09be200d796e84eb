// New MLA rows in one launch: rope on the queries' rope part; RMS norm and gamma on the latent, rope on the shared key
// part, and the finished row cast or quantised to its slot.
//
// Naively, for token t at position p:
//     q_out[t, h] = rope(q[t, h], freqs[p])                               rounded to T
//     n = round(kv[t, :C] / sqrt(mean(kv[t, :C]^2) + epsilon)); n = round(n * gamma)
//     k = round(rope(kv[t, C:], freqs[p]));  cache[slot] = quantise([n, k])
// Here a token has 1 + q_warps warps. Warp 0 does the row: it reads it once, to f32 in its part of shared memory,
// summing the squares on the way, finishes it there (rounded to T, which f32 holds exactly), and hands it to the same
// routine that kv_store uses. The others share the heads' units of 16 bytes. Nothing waits for another warp.
//
// kv null: the un-finished row is read from the slot itself (to f32), which the detour over shared memory makes safe.
//
// What differs by a run-time number (the cache's dtype, the kind of pairs) is instantiated in as few places as can be:
// NVRTC compiles this while somebody waits.
#include "params.cuh"
#include "rows.cuh"

constexpr u32 THREADS = 128;

// What rope_unit loads from and stores to. Structs, not lambdas: NVRTC takes the operator of a generic lambda for a
// host function.
template <class T> struct FromMemory {
    const T *row;
    template <u32 N> PKV_INLINE void operator()(u32 c, float (&x)[N]) const { load_elements(row + c, x); }
};
template <class T> struct ToMemory {
    T *row;
    template <u32 N> PKV_INLINE void operator()(u32 c, const float (&x)[N]) const { store_elements(row + c, x); }
};
template <class T> struct ToRounded { // f32 that T can hold
    float *row;
    template <u32 N> PKV_INLINE void operator()(u32 c, float (&x)[N]) const {
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) x[j] = round_to<T>(x[j]);
        store_elements(row + c, x);
    }
};

template <u32 N, class Load, class Store>
PKV_DEVICE void rope_one(const MlaRopeRmsnormQuantizeParams &p, u32 unit, i64 freqs_row, Load load, Store store) {
    if (opaque(p.half_split)) rope_unit<N, true>(unit, p.rope_width, p.freqs, p.freqs_dtype, freqs_row, load, store);
    else rope_unit<N, false>(unit, p.rope_width, p.freqs, p.freqs_dtype, freqs_row, load, store);
}
template <u32 N> PKV_DEVICE u32 units(const MlaRopeRmsnormQuantizeParams &p) {
    return p.half_split ? rope_units<N, true>(p.rope_width) : rope_units<N, false>(p.rope_width);
}

template <class T, u32 N>
PKV_DEVICE void finish_row(const MlaRopeRmsnormQuantizeParams &p, u64 token, Slot slot, i64 freqs_row, float *row) {
    const T *kv = p.kv ? static_cast<const T *>(p.kv) + i64(token) * p.kv_stride : nullptr;
    const u32 lane = lane_id();
    float sum = 0.0f;
    for (u32 c = lane * N; c < p.cache.head_size; c += WARP * N) {
        float x[N];
        if (kv) load_elements(kv + c, x);
        else load_cached(p.cache, slot, 0, c, x);
        store_elements(row + c, x);
        if (c < p.latent) {
            PKV_UNROLL
            for (u32 j = 0; j < N; j++) sum = __fadd_rn(sum, __fmul_rn(x[j], x[j]));
        }
    }
    sum = warp_sum(sum);
    __syncwarp();
    const float root = __fsqrt_rn(__fadd_rn(__fdiv_rn(sum, float(p.latent)), p.epsilon));
    const ToRounded<T> store{row};
    for (u32 c = lane * N; c < p.latent; c += WARP * N) {
        float x[N], gamma[N];
        load_elements(row + c, x);
        load_f32s<N, (N > 1)>(p.gamma, p.gamma_dtype, c, gamma);
        PKV_UNROLL
        for (u32 j = 0; j < N; j++) x[j] = __fmul_rn(round_to<T>(__fdiv_rn(x[j], root)), gamma[j]);
        store(c, x);
    }
    float *rope = row + p.latent;
    for (u32 unit = lane; unit < units<N>(p); unit += WARP)
        rope_one<N>(p, unit, freqs_row, FromMemory<float>{rope}, ToRounded<T>{rope});
    __syncwarp();
    store_row<float, N>(p.cache, slot, 0, row);
}

template <class T, u32 N>
PKV_DEVICE void rope_heads(const MlaRopeRmsnormQuantizeParams &p, u64 token, u32 part, i64 freqs_row) {
    const T *q = static_cast<const T *>(p.q_rope) + i64(token) * p.q_token_stride;
    T *out = static_cast<T *>(p.q_rope_output) + i64(token) * p.output_token_stride;
    const u32 per_head = units<N>(p);
    const u64 all = u64(per_head) * p.num_heads;
    for (u64 i = u64(part) * WARP + lane_id(); i < all; i += u64(p.q_warps) * WARP) {
        const u32 head = u32(i / per_head), unit = u32(i - u64(head) * per_head);
        rope_one<N>(p, unit, freqs_row, FromMemory<T>{q + i64(head) * p.q_head_stride},
                    ToMemory<T>{out + i64(head) * p.output_head_stride});
    }
}

template <class T, u32 N> PKV_DEVICE void mla_rope_rmsnorm_quantize_rows(const MlaRopeRmsnormQuantizeParams &p) {
    PKV_DYNAMIC_SHARED(float, rows); // [blockDim / 32][head_size, rounded up to 16 bytes]
    float *row = rows + warp_id() * round_up(p.cache.head_size, 4u);
    const u32 warps_per_block = blockDim.x / WARP, per_token = 1 + p.q_warps;
    const u64 warps = u64(gridDim.x) * warps_per_block, items = p.tokens * per_token;
    for (u64 item = u64(blockIdx.x) * warps_per_block + warp_id(); item < items; item += warps) {
        const u64 token = item / per_token;
        const u32 part = u32(item - token * per_token);
        TokenPlace place;
        if (!find_token(p.batch, token, place)) return;
        if (place.position >= p.max_positions) continue;
        const i64 freqs_row = i64(place.position) * p.freqs_stride;
        if (part > 0) {
            rope_heads<T, N>(p, token, part - 1, freqs_row);
        } else {
            Slot slot;
            if (!find_slot(p.batch, p.cache, place.sequence, place.position, slot)) continue;
            __syncwarp(); // the row of the round before is read
            finish_row<T, N>(p, token, slot, freqs_row, row);
        }
    }
}

template <class T> PKV_DEVICE void mla_rope_rmsnorm_quantize(const MlaRopeRmsnormQuantizeParams &p) {
    if (p.vector) mla_rope_rmsnorm_quantize_rows<T, Pack<T>::size>(p);
    else mla_rope_rmsnorm_quantize_rows<T, 1>(p);
}

PKV_KERNEL(mla_rope_rmsnorm_quantize_f32, MlaRopeRmsnormQuantizeParams, THREADS, 1) {
    mla_rope_rmsnorm_quantize<float>(p);
}
PKV_KERNEL(mla_rope_rmsnorm_quantize_f16, MlaRopeRmsnormQuantizeParams, THREADS, 1) {
    mla_rope_rmsnorm_quantize<f16>(p);
}
PKV_KERNEL(mla_rope_rmsnorm_quantize_bf16, MlaRopeRmsnormQuantizeParams, THREADS, 1) {
    mla_rope_rmsnorm_quantize<bf16>(p);
}
