// A ring of buffers in shared memory between warps that fill them and warps that empty them. Step n is in buffer
// n % STAGES; two mbarriers a buffer, full and empty, count the warps that are done with it.
//
//   init(thread, filling, emptying)    threads 0 .. STAGES - 1, before a __syncthreads: how many warps there are of each
//   wait_empty(n), announce(n)         around filling, by whole warps. Announced is what the warp has stored or copied
//                                      and waited for; the tensor core sees it as well
//   wait_full(n), release(n)           around emptying, by whole warps
#pragma once
#include "device/mbarrier.cuh"
#include "device/warp.cuh"

template <u32 STAGES> struct Ring {
    static constexpr u32 BYTES = 2 * STAGES * 8;
    u64 *full, *empty;

    PKV_INLINE explicit Ring(u8 *barriers) : full(reinterpret_cast<u64 *>(barriers)), empty(full + STAGES) {}
    PKV_INLINE void init(u32 thread, u32 filling, u32 emptying) const {
        if (thread >= STAGES) return;
        mbarrier_init(full + thread, filling);
        mbarrier_init(empty + thread, emptying);
    }
    PKV_INLINE void wait_empty(u32 n) const { mbarrier_wait(empty + n % STAGES, (n / STAGES & 1) ^ 1); }
    PKV_INLINE void announce(u32 n) const {
        fence_async_proxy();
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(full + n % STAGES);
    }
    PKV_INLINE void wait_full(u32 n) const { mbarrier_wait(full + n % STAGES, n / STAGES & 1); }
    PKV_INLINE void release(u32 n) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(empty + n % STAGES);
    }
};
