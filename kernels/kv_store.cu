// Appends rows to a key or value cache: row (token, head) of `values` to the token's slot, cast or quantised by groups.
//
// A warp a row. Rows are counted in 64 bits and walked with the grid's stride, so no grid limit matters; grids come
// from the padded extents that the host knows, and rows past row_offsets[batch_size] end at once: a captured graph may
// be replayed with another batch.
#include "params.cuh"
#include "rows.cuh"

constexpr u32 THREADS = 128;

template <class T, u32 N> PKV_DEVICE void kv_store_rows(const KvStoreParams &p) {
    const u64 warps = u64(gridDim.x) * (THREADS / WARP), rows = p.tokens * p.cache.num_heads;
    for (u64 row = u64(blockIdx.x) * (THREADS / WARP) + warp_id(); row < rows; row += warps) {
        const u64 token = row / p.cache.num_heads;
        const u32 head = u32(row - token * p.cache.num_heads);
        TokenPlace place;
        if (!find_token(p.batch, token, place)) return;
        Slot slot;
        if (!find_slot(p.batch, p.cache, place.sequence, place.position, slot)) continue;
        store_row<T, N>(p.cache, slot, head,
                        static_cast<const T *>(p.values) + i64(token) * p.token_stride + i64(head) * p.head_stride);
    }
}

template <class T> PKV_DEVICE void kv_store(const KvStoreParams &p) {
    if (p.vector) kv_store_rows<T, Pack<T>::size>(p);
    else kv_store_rows<T, 1>(p);
}

PKV_KERNEL(kv_store_f32, KvStoreParams, THREADS, 1) { kv_store<float>(p); }
PKV_KERNEL(kv_store_f16, KvStoreParams, THREADS, 1) { kv_store<f16>(p); }
PKV_KERNEL(kv_store_bf16, KvStoreParams, THREADS, 1) { kv_store<bf16>(p); }
