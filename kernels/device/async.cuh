// cp.async (sm_80+): copies from global to shared memory that bypass the registers.
//
//   cp_async_16(smem, gmem)            both 16-byte aligned
//   cp_async_16(smem, gmem, valid)     zeroes where not valid; gmem is then not read, but must be a global address
//                                      (pass any valid one)
//   cp_async_4(smem, gmem, valid)      the same for 4 bytes
//   cp_async_commit()                  closes a group
//   cp_async_wait<N>()                 at most N of this thread's newest groups still under way; other threads need a
//                                      __syncthreads too
//
// The emulation copies as early as it may, in reverse order as late (at the wait): a buffer that is still read, or a
// missing wait, is seen there.
#pragma once
#include "device/common.cuh"

#ifdef PKV_EMULATE

PKV_DEVICE void cp_async_16(void *smem, const void *gmem, bool valid = true) {
    pkv_emu::cp_async(smem, gmem, valid, 16);
}
PKV_DEVICE void cp_async_4(void *smem, const void *gmem, bool valid) { pkv_emu::cp_async(smem, gmem, valid, 4); }
PKV_DEVICE void cp_async_commit() { pkv_emu::cp_async_commit(); }
template <u32 N> PKV_DEVICE void cp_async_wait() { pkv_emu::cp_async_wait(N); }

#else

PKV_DEVICE u32 shared_address(const void *smem) { return static_cast<u32>(__cvta_generic_to_shared(smem)); }

PKV_DEVICE void cp_async_16(void *smem, const void *gmem) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(smem)), "l"(gmem) : "memory");
}
PKV_DEVICE void cp_async_16(void *smem, const void *gmem, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(smem)), "l"(gmem),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
PKV_DEVICE void cp_async_4(void *smem, const void *gmem, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(smem)), "l"(gmem),
                 "r"(valid ? 4 : 0)
                 : "memory");
}
PKV_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <u32 N> PKV_DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

#endif
