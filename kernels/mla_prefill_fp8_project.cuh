// Where a finished tile of the up-projection goes: every row in 16-byte pieces, each to its head's K or V.
#pragma once
#include "device/vector.cuh"
#include "mla_prefill_fp8.cuh"

// Features past the head's own K (or V) columns that its last column's thread fills with zeros.
template <class T> PKV_DEVICE void store_element(const MlaPrefillProjectParams &p, u64 row, u32 feature, T x) {
    const u32 width = p.nope + p.value_width, head = feature / width, c = feature - head * width;
    if (head < p.first_head || head >= p.first_head + p.heads) return;
    const bool key = c < p.nope;
    const u32 column = key ? c : c - p.nope, used = key ? p.nope : p.value_width;
    const u32 stride = key ? p.key_stride : p.value_stride;
    T *to = static_cast<T *>(key ? p.keys : p.values) + (i64(head - p.first_head) * i64(p.rows) + i64(row)) * stride;
    to[column] = x;
    if (column + 1 == used)
        for (u32 i = used; i < stride; i++) to[i] = T{};
}

// tile: `rows` rows of FEATURES, STRIDE elements apart, in shared memory; by `threads` threads, of which this is one.
template <u32 STRIDE, u32 FEATURES, class T>
PKV_DEVICE void store_tile(const MlaPrefillProjectParams &p, const T *tile, u32 rows, u64 first_row, u32 first_feature,
                           u32 thread, u32 threads) {
    constexpr u32 N = Pack<T>::size, PIECES = FEATURES / N;
    const u32 width = p.nope + p.value_width;
    const bool whole = p.nope % COLUMN_PAD == 0 && p.value_width % COLUMN_PAD == 0;
    for (u32 i = thread; i < rows * PIECES; i += threads) {
        const u32 r = i / PIECES, c = i % PIECES * N, feature = first_feature + c;
        const u64 row = first_row + r;
        if (row >= p.rows || feature >= p.features) continue;
        const T *from = tile + r * STRIDE + c;
        if (!whole) {
            for (u32 j = 0; j < N && feature + j < p.features; j++) store_element(p, row, feature + j, from[j]);
            continue;
        }
        const u32 head = feature / width, column = feature - head * width;
        if (head < p.first_head || head >= p.first_head + p.heads) continue;
        const i64 at = i64(head - p.first_head) * i64(p.rows) + i64(row);
        T *to = column < p.nope ? static_cast<T *>(p.keys) + at * p.key_stride + column
                                : static_cast<T *>(p.values) + at * p.value_stride + (column - p.nope);
        store16(to, load16<T>(from));
    }
}
