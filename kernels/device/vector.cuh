// 16-byte accesses.
//
//   Pack<T>                            16 bytes as `v[16 / sizeof(T)]`; Pack<T>::size
//   load16<T>(p), store16(p, pack)     p 16-byte aligned, global or shared
#pragma once
#include "device/common.cuh"

template <class T> struct alignas(16) Pack {
    static constexpr u32 size = 16 / sizeof(T);
    T v[size];
};

template <class T> PKV_DEVICE Pack<T> load16(const void *p) {
    union {
        uint4 raw;
        Pack<T> pack;
    } u{*static_cast<const uint4 *>(p)};
    return u.pack;
}

template <class T> PKV_DEVICE void store16(void *p, const Pack<T> &pack) {
    *static_cast<uint4 *>(p) = *reinterpret_cast<const uint4 *>(&pack);
}
