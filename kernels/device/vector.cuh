// 16-byte accesses.
//
//   Pack<T>                            16 bytes as `v[16 / sizeof(T)]`; Pack<T>::size
//   load16<T>(p), store16(p, pack)     p 16-byte aligned, global or shared
//   load16_once<T>(p)                  global, read-only for the whole launch and read once: past L1, evicted first
//   from L2 store16_once(p, pack)              global, written once and not read again soon aligned16(p)
#pragma once
#include "device/common.cuh"

template <class T> struct alignas(16) Pack {
    static constexpr u32 size = 16 / sizeof(T);
    T v[size];
};

PKV_DEVICE bool aligned16(const void *p) { return (reinterpret_cast<u64>(p) & 15) == 0; }

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

#ifdef PKV_EMULATE
template <class T> PKV_DEVICE Pack<T> load16_once(const void *p) { return load16<T>(p); }
template <class T> PKV_DEVICE void store16_once(void *p, const Pack<T> &pack) { store16(p, pack); }
#else
template <class T> PKV_DEVICE Pack<T> load16_once(const void *p) {
    union {
        uint4 raw;
        Pack<T> pack;
    } u;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(u.raw.x), "=r"(u.raw.y), "=r"(u.raw.z), "=r"(u.raw.w)
                 : "l"(p));
    return u.pack;
}
template <class T> PKV_DEVICE void store16_once(void *p, const Pack<T> &pack) {
    const uint4 raw = *reinterpret_cast<const uint4 *>(&pack);
    asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w)
                 : "memory");
}
#endif
