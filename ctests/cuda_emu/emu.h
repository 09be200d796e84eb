// Host side of the emulation: find a kernel, launch it. Used by the fake driver and by C++ tests of kernels.
#pragma once
using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;
#include "cuda_emu.h"

namespace pkv_emu {

// file: the end of the source's path ("kv_store.cu"), or null for any.
const Kernel *find_kernel(const char *name, const char *file = nullptr);
bool has_kernels_of(const char *file);
const Kernel *first_kernel(); // then `next`

// Runs the whole grid. Limits (grid, block, shared memory) are the caller's business: the fake driver checks them as a
// card does.
void launch(const Kernel &kernel, dim3 grid, dim3 block, size_t dynamic_shared, const void *params);

template <class Params>
void launch(const char *name, dim3 grid, u32 threads, size_t dynamic_shared, const Params &params) {
    const Kernel *kernel = find_kernel(name);
    if (!kernel || kernel->params_size != sizeof(Params) || threads > kernel->max_threads) fail(name);
    launch(*kernel, grid, dim3{threads, 1, 1}, dynamic_shared, &params);
}

} // namespace pkv_emu
