// What warps of different trades in one block meet with, from Hopper on: barriers in shared memory that count arrivals,
// barriers of part of a block, and the fence between the two roads into shared memory.
//
//   mbarrier_init(bar, count)          one thread; everybody else may use it after a __syncthreads
//   mbarrier_arrive(bar)               one of the `count` arrivals that complete a phase; what the thread did before is
//                                      seen by those who waited for it
//   mbarrier_wait(bar, parity)         until the phase of that parity is complete. Phases count from 0; the phase
//                                      before the first counts as complete, so a producer's first wait for a free
//                                      buffer is for parity 1
//   named_barrier(id, threads)         bar.sync: `threads` threads (whole warps) that name the same id, 1 .. 15
//   fence_async_proxy()                what this thread wrote to shared memory (stores, cp.async that was waited for)
//                                      is seen by the tensor core, once the threads that start it have met this one
//   registers_take<N>(), _give<N>()    setmaxnreg: this warpgroup runs with N registers a thread from here on
#pragma once
#include "device/async.cuh"

#ifdef PKV_EMULATE

PKV_DEVICE void mbarrier_init(u64 *bar, u32 count) { pkv_emu::mbarrier_init(bar, count); }
PKV_DEVICE void mbarrier_arrive(u64 *bar) { pkv_emu::mbarrier_arrive(bar); }
PKV_DEVICE void mbarrier_wait(u64 *bar, u32 parity) { pkv_emu::mbarrier_wait(bar, parity); }
PKV_DEVICE void named_barrier(u32 id, u32 threads) { pkv_emu::named_barrier(id, threads); }
PKV_DEVICE void fence_async_proxy() { pkv_emu::fence_async_proxy(); }
template <u32 N> PKV_DEVICE void registers_take() {}
template <u32 N> PKV_DEVICE void registers_give() {}

#else

PKV_DEVICE void mbarrier_init(u64 *bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
PKV_DEVICE void mbarrier_arrive(u64 *bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
PKV_DEVICE void mbarrier_wait(u64 *bar, u32 parity) {
    u32 complete;
    do {
        asm volatile("{\n"
                     ".reg .pred complete;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, complete;\n"
                     "}"
                     : "=r"(complete)
                     : "r"(shared_address(bar)), "r"(parity)
                     : "memory");
    } while (!complete);
}
PKV_DEVICE void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
PKV_DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <u32 N> PKV_DEVICE void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <u32 N> PKV_DEVICE void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

#endif
