// The accesses of the emulation's own code that belong to the kernel: see cp_async_wait and run_wgmma.
#include "emu.h"

namespace pkv_emu {
void async_copy(void *to, const void *from, bool valid, u32 size) {
    u8 *t = static_cast<u8 *>(to);
    const u8 *f = static_cast<const u8 *>(from);
    for (u32 i = 0; i < size; i++) t[i] = valid ? f[i] : 0;
}
void read_piece(const u8 *from, u64 (&piece)[2]) {
    piece[0] = reinterpret_cast<const u64 *>(from)[0];
    piece[1] = reinterpret_cast<const u64 *>(from)[1];
}
} // namespace pkv_emu
