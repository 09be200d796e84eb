// Copies cached rows to a contiguous buffer, dequantised: buffer row r of sequence b is position
// cache_offsets[b] + (r - buffer_row_offsets[b]). A warp a row, walked as in kv_store.cu.
//
// A position that the sequence does not hold, or that its table leads nowhere, gives a row of zeros: nothing outside
// the collection is read, and no stale value looks like a key.
#include "params.cuh"
#include "rows.cuh"

constexpr u32 THREADS = 128;

template <class T, u32 N> PKV_DEVICE void kv_gather_rows(const KvGatherParams &p) {
    const u64 warps = u64(gridDim.x) * (THREADS / WARP), rows = p.rows * p.cache.num_heads;
    for (u64 row = u64(blockIdx.x) * (THREADS / WARP) + warp_id(); row < rows; row += warps) {
        const u64 r = row / p.cache.num_heads;
        const u32 head = u32(row - r * p.cache.num_heads);
        if (r >= p.buffer_row_offsets[p.batch.batch_size]) return;
        const u32 b = find_sequence(p.buffer_row_offsets, p.batch.batch_size, u32(r));
        const u64 position = (p.cache_offsets ? p.cache_offsets[b] : 0u) + (r - p.buffer_row_offsets[b]);
        const u32 new_tokens = p.batch.row_offsets[b + 1] - p.batch.row_offsets[b];
        Slot slot{};
        const bool held =
            position < u64(p.batch.cache_lengths[b]) + new_tokens && find_slot(p.batch, p.cache, b, position, slot);
        T *out = static_cast<T *>(p.out) + i64(r) * p.row_stride + i64(head) * p.head_stride;
        for (u32 c = lane_id() * N; c < p.cache.head_size; c += WARP * N) {
            float x[N] = {};
            if (held) load_cached<N>(p.cache, slot, head, c, x);
            store_elements<T, N>(out + c, x);
        }
    }
}

template <class T> PKV_DEVICE void kv_gather(const KvGatherParams &p) {
    if (p.vector) kv_gather_rows<T, Pack<T>::size>(p);
    else kv_gather_rows<T, 1>(p);
}

PKV_KERNEL(kv_gather_f32, KvGatherParams, THREADS, 1) { kv_gather<float>(p); }
PKV_KERNEL(kv_gather_f16, KvGatherParams, THREADS, 1) { kv_gather<f16>(p); }
PKV_KERNEL(kv_gather_bf16, KvGatherParams, THREADS, 1) { kv_gather<bf16>(p); }
