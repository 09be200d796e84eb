// Gathers cached rows, rounds them to T, and quantises the latent part for the up-projection:
//     s = min(amax, 1200) / 448, code = sat(x * (1 / s)) per row and 128 columns; zero codes where 1 / s is no number.
// A warp a row; of each 128 columns a lane takes four, neighbours where they may be loaded at once.
//
// A row that its table leads nowhere becomes zeros. Rows past the batch's last are nobody's and stay as they are.
#include "mla_prefill_fp8.cuh"
#include "rows.cuh"

constexpr u32 THREADS = 128;

template <class T, bool VECTOR> PKV_DEVICE void latent_rows(const MlaPrefillLatentParams &p) {
    const u32 lane = lane_id();
    const u64 warps = u64(gridDim.x) * (THREADS / WARP);
    for (u64 row = u64(blockIdx.x) * (THREADS / WARP) + warp_id(); row < p.buffer.rows; row += warps) {
        if (row >= p.buffer.row_offsets[p.batch.batch_size]) return;
        const u32 b = find_sequence(p.buffer.row_offsets, p.batch.batch_size, u32(row));
        const BufferRange range = buffer_range(p.buffer, b);
        const u64 position = range.position + (row - range.first);
        const u32 new_tokens = p.batch.row_offsets[b + 1] - p.batch.row_offsets[b];
        Slot slot{};
        const bool held =
            position < u64(p.batch.cache_lengths[b]) + new_tokens && find_slot(p.batch, p.cache, b, position, slot);
        for (u32 g = 0; g < p.latent / SCALE_BLOCK; g++) {
            const u32 c = g * SCALE_BLOCK + (VECTOR ? 4 * lane : lane);
            float x[4] = {};
            if (held) {
                if constexpr (VECTOR) {
                    load_cached<4>(p.cache, slot, 0, c, x);
                } else {
                    PKV_UNROLL
                    for (u32 j = 0; j < 4; j++) {
                        float one[1];
                        load_cached<1>(p.cache, slot, 0, c + WARP * j, one);
                        x[j] = one[0];
                    }
                }
            }
            float amax = 0.0f;
            PKV_UNROLL
            for (u32 j = 0; j < 4; j++) {
                x[j] = round_to<T>(x[j]);
                amax = fmaxf(amax, fabsf(x[j])); // a NaN is passed over
            }
            const float s = __fdiv_rn(fminf(warp_max(amax), 1200.0f), 448.0f);
            const float inverse = __fdiv_rn(1.0f, s);
            const bool zero = !(inverse < f32_inf());
            PKV_UNROLL
            for (u32 j = 0; j < 4; j++) x[j] = zero ? 0.0f : __fmul_rn(x[j], inverse);
            u8 *codes = p.codes + i64(row) * p.latent + c;
            if constexpr (VECTOR) {
                store_elements(reinterpret_cast<e4m3 *>(codes), x);
            } else {
                PKV_UNROLL
                for (u32 j = 0; j < 4; j++) codes[WARP * j] = from_f32<e4m3>(x[j]).bits;
            }
            if (lane == 0) p.scales[g * p.scale_stride + i64(row)] = s;
        }
        T *k_rope = static_cast<T *>(p.k_rope) + i64(row) * p.rope_stride;
        for (u32 c = lane; c < p.rope_stride; c += WARP) {
            float x[1] = {};
            if (held && c < p.rope_width) load_cached<1>(p.cache, slot, 0, p.latent + c, x);
            k_rope[c] = from_f32<T>(x[0]);
        }
    }
}

template <class T> PKV_DEVICE void mla_prefill_fp8_latent(const MlaPrefillLatentParams &p) {
    if (p.vector) latent_rows<T, true>(p);
    else latent_rows<T, false>(p);
}

PKV_KERNEL(mla_prefill_fp8_latent_f32, MlaPrefillLatentParams, THREADS, 1) { mla_prefill_fp8_latent<float>(p); }
PKV_KERNEL(mla_prefill_fp8_latent_f16, MlaPrefillLatentParams, THREADS, 1) { mla_prefill_fp8_latent<f16>(p); }
PKV_KERNEL(mla_prefill_fp8_latent_bf16, MlaPrefillLatentParams, THREADS, 1) { mla_prefill_fp8_latent<bf16>(p); }
