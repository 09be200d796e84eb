// The one access of the emulation's own code that belongs to the kernel; see cp_async_wait.
#include "emu.h"

namespace pkv_emu {
void async_copy_16(void *to, const void *from, bool valid) {
    u8 *t = static_cast<u8 *>(to);
    const u8 *f = static_cast<const u8 *>(from);
    for (u32 i = 0; i < 16; i++) t[i] = valid ? f[i] : 0;
}
} // namespace pkv_emu
