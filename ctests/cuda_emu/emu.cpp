// Fibers, meetings, launches. Compiled without -fsanitize=thread even in a race-detecting build (PKV_EMU_TSAN is then
// defined): the bookkeeping here is ordered by construction, and only the kernels' own accesses are to be judged.
#include "emu.h"
#include "wgmma_model.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <thread>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#ifdef PKV_EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef PKV_EMU_TSAN
extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
void __tsan_read8(void *address);
void __tsan_write8(void *address);
}
#endif

namespace pkv_emu {

thread_local const Place *place = nullptr;

static Kernel *kernels;

Register::Register(Kernel *kernel) {
    kernel->next = kernels;
    kernels = kernel;
}

static bool ends_with(const char *path, const char *end) {
    const size_t n = strlen(path), m = strlen(end);
    return n >= m && memcmp(path + n - m, end, m) == 0 && (n == m || path[n - m - 1] == '/');
}
const Kernel *find_kernel(const char *name, const char *file) {
    for (const Kernel *k = kernels; k; k = k->next)
        if (strcmp(k->name, name) == 0 && (!file || ends_with(k->file, file))) return k;
    return nullptr;
}
const Kernel *first_kernel() { return kernels; }
bool has_kernels_of(const char *file) {
    for (const Kernel *k = kernels; k; k = k->next)
        if (ends_with(k->file, file)) return true;
    return false;
}

// ---- context switch ----

#if defined(__x86_64__)
struct Context {
    void *sp = nullptr;
};
// Saves the callee-saved registers on the stack that is left, and takes those of the stack that is entered.
extern "C" void pkv_emu_switch(void **save_sp, void *load_sp);
asm(R"(
.text
.globl pkv_emu_switch
.hidden pkv_emu_switch
.type pkv_emu_switch, @function
pkv_emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size pkv_emu_switch, .-pkv_emu_switch
)");
static void raw_switch(Context &from, Context &to) { pkv_emu_switch(&from.sp, to.sp); }
static void prepare(Context &context, u8 *stack, size_t size, void (*entry)()) {
    void **sp = reinterpret_cast<void **>(stack + size) - 1;
    *sp = nullptr; // where a return address would be: the ABI wants the stack 8 past a multiple of 16 at entry
    *--sp = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    context.sp = sp;
}
#else
struct Context {
    ucontext_t u;
};
static void raw_switch(Context &from, Context &to) { swapcontext(&from.u, &to.u); }
static void prepare(Context &context, u8 *stack, size_t size, void (*entry)()) {
    getcontext(&context.u);
    context.u.uc_stack.ss_sp = stack;
    context.u.uc_stack.ss_size = size;
    context.u.uc_link = nullptr;
    makecontext(&context.u, entry, 0);
}
#endif

#if defined(PKV_EMU_ASAN) || defined(PKV_EMU_TSAN)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif
constexpr size_t GUARD = 4096;

// What a fiber stands on. Used again by later launches: the race detector's clocks grow with every thread there ever
// was.
struct Footing {
    u8 *stack;
    void *tsan; // its thread to the race detector
};
static std::mutex footings_mutex;
static std::vector<Footing> footings;

static Footing take_footing() {
    {
        std::lock_guard lock(footings_mutex);
        if (!footings.empty()) {
            const Footing used = footings.back();
            footings.pop_back();
#ifdef PKV_EMU_ASAN
            __asan_unpoison_memory_region(used.stack, STACK); // frames that were left, not returned from
#endif
            return used;
        }
    }
    void *base =
        mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) fail("no memory for a stack");
    mprotect(base, GUARD, PROT_NONE);
    Footing made{static_cast<u8 *>(base) + GUARD, nullptr};
#ifdef PKV_EMU_TSAN
    made.tsan = __tsan_create_fiber(0);
#endif
    return made;
}
static void return_footing(Footing footing) {
    std::lock_guard lock(footings_mutex);
    footings.push_back(footing);
}

// ---- a worker: the fibers of one OS thread ----

struct AsyncCopy {
    void *to;
    const void *from;
    bool valid;
    u32 group, size;
};

enum State : u8 { DONE, READY, IN_BARRIER, IN_MEETING, IN_MBARRIER, IN_NAMED_BARRIER, IN_WARPGROUP };

// A thread's D of the wgmma under way, away from the kernel's reach.
struct Accumulator {
    float *home = nullptr; // null: free
    u32 registers = 0, pending = 0;
    float value[128];
};
struct Tensor { // a thread's side of its warpgroup
    static constexpr u32 ACCUMULATORS = 8;
    Accumulator accumulators[ACCUMULATORS];
    u64 issued = 0, committed = 0; // operations
    u64 groups = 0, group_end[64]; // operations by the end of a group, modulo 64
    bool fenced = false;
};

struct Fiber {
    Context context;
    Place place;
    State state = DONE;
    Meeting meeting;
    u32 mask, index;
    u64 generation;
    u32 async_group = 0;
    std::vector<AsyncCopy> async;
    std::unique_ptr<Tensor> tensor;
    const u64 *bar = nullptr; // waited for, until the phase of this parity is complete
    u32 parity = 0;
    u32 proxy_epoch = 0; // fences of the async proxy
    Footing footing;
#ifdef PKV_EMU_ASAN
    void *fake_stack = nullptr;
#endif
};

// The lanes of one mask of one warp. The generation counts completed meetings; two sets of slots, because a fast lane
// may bring its bytes for the next meeting while a slow one still reads the last.
struct Group {
    u32 mask = 0, arrived = 0;
    Meeting meeting;
    u64 generation = 0;
    alignas(64) u8 slots[2][32][64];
    float result[2][16][8];
    char order[2]; // __syncwarp, by parity of the generation
};

struct Wgmma {
    Meeting type;
    u32 n;
    bool a_in_registers, add, n_major;
    u64 a_descriptor, b_descriptor;
    u32 accumulator[128], a[128][4]; // by thread
};
struct Warpgroup {
    static constexpr u32 OPERATIONS = 64;
    Wgmma operations[OPERATIONS]; // by number, modulo
    u32 taken[OPERATIONS] = {};   // threads that brought their part
    u64 made = 0, done = 0;
    u32 arrived = 0;
    u64 generation = 0, target = 0;
    char order[2];
    float a[64 * 32], b[32 * 256], d[64 * 256];
};
struct NamedBarrier {
    u32 expected = 0, arrived = 0;
    u64 generation = 0;
    char order[2];
};
struct Write { // to 16 bytes of shared memory, past the async proxy
    u32 writer = 0, epoch = 0; // writer: its number and one
};

struct Worker {
    const Kernel *kernel = nullptr;
    const void *params = nullptr;
    dim3 grid, block;
    u32 threads = 0, alive = 0, in_barrier = 0;
    u64 barrier_generation = 0;
    u32 count[2] = {}, last_count = 0, last_threads = 0;
    bool reverse = false;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<std::vector<std::unique_ptr<Group>>>
        groups; // by warp; allocated by the OS thread, so that no lane's allocation looks like a race
    std::vector<u32> groups_used;
    std::vector<std::unique_ptr<Warpgroup>> warpgroups;
    NamedBarrier named[16];
    std::vector<Write> writes; // by 16 bytes of `shared`
    bool wrote = false;
    std::unique_ptr<u8[]> shared_raw; // `shared` lies in it, 1024-byte aligned
    u8 *shared = nullptr;
    size_t shared_size = 0;
    Context main;
    Fiber *current = nullptr;
#ifdef PKV_EMU_TSAN
    void *main_tsan = nullptr;
#endif
    char order[4];
#ifdef PKV_EMU_ASAN
    void *main_fake_stack = nullptr;
    const void *main_bottom = nullptr;
    size_t main_size = 0;
#endif

    ~Worker() {
        for (auto &f : fibers) return_footing(f->footing);
#ifdef PKV_EMU_ASAN
        __asan_unpoison_memory_region(shared_raw.get(), shared_size + 1024);
#endif
    }
};
static thread_local Worker *worker = nullptr;

void fail(const char *what) {
    if (worker && worker->current) {
        const Place &p = worker->current->place;
        fprintf(stderr, "cuda_emu: %s: %s: block (%u, %u, %u), thread %u\n", worker->kernel->name, what, p.block.x,
                p.block.y, p.block.z, p.thread.x);
    } else {
        fprintf(stderr, "cuda_emu: %s\n", what);
    }
    abort();
}

// What orders two accesses for the race detector: a __syncwarp (Group::order), and for a worker 0, 1 a __syncthreads
// (by parity), BEGIN and END of a block.
constexpr int BEGIN = 2, END = 3;
static void order_release([[maybe_unused]] char &point) {
#ifdef PKV_EMU_TSAN
    __tsan_release(&point);
#endif
}
static void order_acquire([[maybe_unused]] char &point) {
#ifdef PKV_EMU_TSAN
    __tsan_acquire(&point);
#endif
}

// `to` null: back to the OS thread's own stack.
static void switch_to(Fiber *to) {
    Worker &w = *worker;
    Fiber *from = w.current;
    if (from == to) return;
    w.current = to;
    place = to ? &to->place : nullptr;
#ifdef PKV_EMU_TSAN
    __tsan_switch_to_fiber(to ? to->footing.tsan : w.main_tsan, 1);
#endif
#ifdef PKV_EMU_ASAN
    if (to) __sanitizer_start_switch_fiber(from ? &from->fake_stack : &w.main_fake_stack, to->footing.stack, STACK);
    else __sanitizer_start_switch_fiber(&from->fake_stack, w.main_bottom, w.main_size);
#endif
    raw_switch(from ? from->context : w.main, to ? to->context : w.main);
#ifdef PKV_EMU_ASAN
    __sanitizer_finish_switch_fiber(from ? from->fake_stack : w.main_fake_stack, nullptr, nullptr);
#endif
}

// The next fiber that can run: first of the own warp, then the following warps. Waking is done by whoever completes a
// meeting.
static Fiber *pick_next() {
    Worker &w = *worker;
    const u32 n = w.threads, me = w.current->index, warps = (n + 31) / 32, my_warp = me / 32;
    for (u32 k = 0; k < warps; k++) {
        const u32 warp = w.reverse ? (my_warp + warps - k) % warps : (my_warp + k) % warps;
        const u32 first = 32 * warp, lanes = n - first < 32 ? n - first : 32;
        const u32 start = k == 0 ? me - first : w.reverse ? 0 : lanes - 1;
        for (u32 j = 1; j <= lanes; j++) {
            const u32 lane = w.reverse ? (start + lanes - j) % lanes : (start + j) % lanes;
            Fiber &f = *w.fibers[first + lane];
            if (f.state == READY) return &f;
        }
    }
    return nullptr;
}

static void wait() {
    Fiber *next = pick_next();
    if (!next) {
        Worker &w = *worker;
        for (u32 i = 0; i < w.threads; i++) {
            const Fiber &f = *w.fibers[i];
            static const char *const places[] = {
                "", "", "__syncthreads", "a warp operation", "mbarrier_wait", "named_barrier", "wgmma"};
            if (f.state > READY)
                fprintf(stderr, "cuda_emu: thread %u waits in %s (kind %u, mask %08x)\n", i, places[f.state],
                        f.state == IN_MEETING ? u32(f.meeting) : 0, f.state == IN_MEETING ? f.mask : 0);
        }
        fail("nothing can run: threads wait for others that have returned or wait elsewhere");
    }
    switch_to(next);
}

static void complete_barrier() {
    Worker &w = *worker;
    const u64 parity = w.barrier_generation & 1;
    w.last_count = w.count[parity];
    w.last_threads = w.alive;
    w.count[parity ^ 1] = 0;
    w.barrier_generation++;
    w.in_barrier = 0;
    for (u32 i = 0; i < w.threads; i++)
        if (w.fibers[i]->state == IN_BARRIER) w.fibers[i]->state = READY;
}

u32 barrier(u32 predicate, u32 combine) {
    Worker &w = *worker;
    Fiber &me = *w.current;
    const u64 generation = w.barrier_generation;
    char &order = w.order[generation & 1];
    order_release(order);
    w.count[generation & 1] += predicate;
    if (++w.in_barrier == w.alive) {
        complete_barrier();
    } else {
        me.state = IN_BARRIER;
        wait();
    }
    order_acquire(order);
    // Nobody can complete the next barrier before this thread arrives there, so the last result still stands.
    return combine == 0 ? w.last_count : combine == 1 ? w.last_count == w.last_threads : w.last_count != 0;
}

static Group &group_of(u32 warp, u32 mask) {
    auto &list = worker->groups[warp];
    u32 &used = worker->groups_used[warp];
    for (u32 i = 0; i < used; i++)
        if (list[i]->mask == mask) return *list[i];
    if (used == list.size()) list.push_back(std::make_unique<Group>());
    list[used]->mask = mask;
    return *list[used++];
}

static void copy_bytes(u8 *to, const u8 *from, u32 size) {
    for (u32 i = 0; i < size; i++) {
        to[i] = from[i];
        asm volatile("" ::: "memory"); // keeps this loop from becoming a call of memcpy, which a sanitizer intercepts
    }
}

static void fill_bytes(u8 *to, size_t size, u8 value) {
    for (size_t i = 0; i < size; i++) {
        to[i] = value;
        asm volatile("" ::: "memory");
    }
}

static float decode(u32 bits, Meeting type) {
    if (type == MMA_BF16) return __uint_as_float(bits << 16);
    if (type == MMA_F16) {
        const u32 sign = (bits & 0x8000) << 16, m = bits & 0x7fff;
        if (m >= 0x7c00) return __uint_as_float(sign | 0x7f800000u | (m & 0x3ff) << 13);
        return __uint_as_float(sign | __float_as_uint(__uint_as_float(m << 13) * 0x1p112f));
    }
    const u32 sign = (bits & 0x80) << 24, m = bits & 0x7f;
    if (m == 0x7f) return __uint_as_float(sign | 0x7fc00000u);
    return __uint_as_float(sign | __float_as_uint(__uint_as_float(m << 20) * 0x1p120f));
}

struct MmaBytes {
    u32 a[4], b[2];
    float c[4];
};

// Once all 32 fragments are there: gather A, B, C by the PTX layout, multiply, leave D for the lanes to pick up.
static void multiply(Group &group, u32 parity, Meeting type) {
    const u32 per = type == MMA_E4M3 ? 4 : 2, K = 8 * per, bits = 32 / per;
    const u32 element_mask = bits == 8 ? 0xff : 0xffff;
    float a[16][32], b[8][32], c[16][8];
    for (u32 lane = 0; lane < 32; lane++) {
        const MmaBytes &m = *reinterpret_cast<const MmaBytes *>(group.slots[parity][lane]);
        const u32 g = lane / 4, t = lane % 4;
        for (u32 i = 0; i < 4; i++) {
            for (u32 e = 0; e < per; e++)
                a[g + 8 * (i & 1)][per * t + e + K / 2 * (i >> 1)] = decode(m.a[i] >> bits * e & element_mask, type);
            c[g + 8 * (i >> 1)][2 * t + (i & 1)] = m.c[i];
        }
        for (u32 i = 0; i < 2; i++)
            for (u32 e = 0; e < per; e++)
                b[g][per * t + e + K / 2 * i] = decode(m.b[i] >> bits * e & element_mask, type);
    }
    for (u32 r = 0; r < 16; r++)
        for (u32 n = 0; n < 8; n++) {
            float sum = c[r][n];
            for (u32 k = 0; k < K; k++) sum += a[r][k] * b[n][k];
            group.result[parity][r][n] = sum;
        }
}

static Group &meet_group(Meeting meeting, u32 mask, const void *bytes, u32 size, u64 &generation) {
    Worker &w = *worker;
    Fiber &me = *w.current;
    const u32 warp = me.index / 32, lane = me.index % 32;
    if (!(mask >> lane & 1)) fail("warp operation: the calling lane is not in its own mask");
    const u32 lanes = w.threads - 32 * warp < 32 ? w.threads - 32 * warp : 32;
    if (lanes < 32 && mask >> lanes != 0) {
        if (mask != 0xffffffffu) fail("warp operation: the mask names lanes the block does not have");
        mask = (1u << lanes) - 1;
    }
    Group &group = group_of(warp, mask);
    generation = group.generation;
    const u32 parity = u32(generation & 1);
    if (group.arrived == 0) group.meeting = meeting;
    else if (group.meeting != meeting) fail("warp operation: lanes of one mask meet in different operations");
    copy_bytes(group.slots[parity][lane], static_cast<const u8 *>(bytes), size);
    if (meeting == SYNCWARP) order_release(group.order[parity]);
    group.arrived |= 1u << lane;
    if (group.arrived == mask) {
        if (meeting >= MMA_F16) multiply(group, parity, meeting);
        group.arrived = 0;
        group.generation++;
        for (u32 l = 0; l < lanes; l++) {
            Fiber &f = *w.fibers[32 * warp + l];
            if (f.state == IN_MEETING && f.mask == mask && f.generation == generation) f.state = READY;
        }
    } else {
        me.state = IN_MEETING;
        me.meeting = meeting;
        me.mask = mask;
        me.generation = generation;
        wait();
    }
    if (meeting == SYNCWARP) order_acquire(group.order[parity]);
    return group;
}

const u8 *meet(Meeting meeting, u32 mask, const void *bytes, u32 size) {
    u64 generation;
    Group &group = meet_group(meeting, mask, bytes, size, generation);
    return group.slots[generation & 1][0];
}

void mma_fragments(float *d, const u32 *a, const u32 *b, Meeting type) {
    MmaBytes mine;
    for (u32 i = 0; i < 4; i++) {
        mine.a[i] = a[i];
        mine.c[i] = d[i];
    }
    mine.b[0] = b[0];
    mine.b[1] = b[1];
    u64 generation;
    Group &group = meet_group(type, 0xffffffffu, &mine, sizeof mine, generation);
    const u32 lane = worker->current->index % 32, g = lane / 4, t = lane % 4;
    for (u32 i = 0; i < 4; i++) d[i] = group.result[generation & 1][g + 8 * (i >> 1)][2 * t + (i & 1)];
}

// Whether the pointer lies in dynamic shared memory; then its offset there.
static bool in_shared(const void *smem, size_t &offset) {
    offset = size_t(static_cast<const u8 *>(smem) - worker->shared);
    return offset < worker->shared_size;
}
void generic_store(const void *smem, u32 size) {
    Worker &w = *worker;
    size_t offset;
    if (!in_shared(smem, offset)) return;
    for (size_t piece = offset / 16; piece <= (offset + size - 1) / 16 && piece < w.writes.size(); piece++)
        w.writes[piece] = {w.current->index + 1, w.current->proxy_epoch};
    w.wrote = true;
}
void fence_async_proxy() { worker->current->proxy_epoch++; }

// The copies themselves are in async_copy.cpp, which is compiled with the sanitizers: they are the kernel's accesses.
void async_copy(void *to, const void *from, bool valid, u32 size);
void cp_async(void *smem, const void *gmem, bool valid, u32 size) {
    if ((reinterpret_cast<u64>(smem) | reinterpret_cast<u64>(gmem)) & (size - 1)) fail("cp.async: address not aligned");
    Fiber &me = *worker->current;
    if (!worker->reverse) {
        async_copy(smem, gmem, valid, size);
        generic_store(smem, size);
    }
    me.async.push_back({smem, gmem, valid, me.async_group, size});
}
void cp_async_commit() { worker->current->async_group++; }
void read_piece(const u8 *from, u64 (&piece)[2]);
void cp_async_wait(u32 newest) {
    Fiber &me = *worker->current;
    size_t done = 0;
    while (done < me.async.size() && me.async[done].group + newest < me.async_group) {
        const AsyncCopy &copy = me.async[done++];
        if (!worker->reverse) continue;
        async_copy(copy.to, copy.from, copy.valid, copy.size);
        generic_store(copy.to, copy.size);
    }
    me.async.erase(me.async.begin(), me.async.begin() + ptrdiff_t(done));
}

// ---- mbarrier, named barriers ----

// In the 64 bits, which the ISA leaves open: a mark, arrivals that complete a phase, arrivals that this one lacks, the
// phases complete so far (modulo 2^16).
struct Mbarrier {
    u16 mark, count, lacks, phase;
};
constexpr u16 MBARRIER_MARK = 0x6d62;
static Mbarrier &mbarrier(u64 *bar) {
    if (reinterpret_cast<u64>(bar) & 7) fail("mbarrier: not 8-byte aligned");
    auto &b = *reinterpret_cast<Mbarrier *>(bar);
    if (b.mark != MBARRIER_MARK) fail("mbarrier: not initialised");
#ifdef PKV_EMU_TSAN
    __tsan_read8(bar);
#endif
    return b;
}
static char &mbarrier_order(u64 *bar, u32 phase) { return reinterpret_cast<char *>(bar)[phase & 1]; }
void mbarrier_init(u64 *bar, u32 count) {
    size_t offset;
    if (!in_shared(bar, offset) || count == 0 || count > 0xffff) fail("mbarrier.init: not shared memory, or its count");
#ifdef PKV_EMU_TSAN
    __tsan_write8(bar);
#endif
    *reinterpret_cast<Mbarrier *>(bar) = {MBARRIER_MARK, u16(count), u16(count), 0};
}
void mbarrier_arrive(u64 *bar) {
    Mbarrier &b = mbarrier(bar);
    order_release(mbarrier_order(bar, b.phase));
    if (--b.lacks != 0) return;
    b.lacks = b.count;
    const u32 parity = b.phase++ & 1;
    for (auto &f : worker->fibers)
        if (f->state == IN_MBARRIER && f->bar == bar && f->parity == parity) f->state = READY;
}
void mbarrier_wait(u64 *bar, u32 parity) {
    Mbarrier &b = mbarrier(bar);
    Fiber &me = *worker->current;
    if (parity > 1) fail("mbarrier.try_wait: parity");
    const u32 waited = b.phase;
    if ((b.phase & 1) == parity) {
        me.state = IN_MBARRIER;
        me.bar = bar;
        me.parity = parity;
        wait();
        // Whoever waits holds up the next phase but one; a barrier where it does not is misused.
        if (u16(b.phase - waited) > 1) fail("mbarrier.try_wait: a phase went by while this thread waited");
    }
    order_acquire(mbarrier_order(bar, parity));
}

void named_barrier(u32 id, u32 threads) {
    Worker &w = *worker;
    Fiber &me = *w.current;
    if (id == 0 || id > 15 || threads == 0 || threads % 32 != 0) fail("bar.sync: id or number of threads");
    NamedBarrier &b = w.named[id];
    if (b.arrived == 0) b.expected = threads;
    else if (b.expected != threads) fail("bar.sync: threads disagree about their number");
    char &order = b.order[b.generation & 1];
    order_release(order);
    if (++b.arrived == threads) {
        b.arrived = 0;
        b.generation++;
        for (auto &f : w.fibers)
            if (f->state == IN_NAMED_BARRIER && f->parity == id) f->state = READY;
    } else {
        me.state = IN_NAMED_BARRIER;
        me.parity = id;
        wait();
    }
    order_acquire(order);
}

// ---- wgmma ----

constexpr u32 SHARED_BASE = 1024; // of dynamic shared memory in the shared window: Hopper keeps the first kilobyte

u32 shared_address(const void *smem) {
    size_t offset;
    if (!in_shared(smem, offset)) fail("wgmma: a tile outside dynamic shared memory");
    return SHARED_BASE + u32(offset);
}

static Tensor &tensor() {
    Fiber &me = *worker->current;
    if (!me.tensor) me.tensor = std::make_unique<Tensor>();
    return *me.tensor;
}
static Warpgroup &warpgroup() {
    Worker &w = *worker;
    const u32 group = w.current->index / 128;
    if (w.threads < 128 * (group + 1)) fail("wgmma: not a whole warpgroup");
    if (w.warpgroups.size() <= group) w.warpgroups.resize(w.threads / 128);
    if (!w.warpgroups[group]) w.warpgroups[group] = std::make_unique<Warpgroup>();
    return *w.warpgroups[group];
}

void wgmma_fence() { tensor().fenced = true; }

void wgmma(float *d, u32 n, Meeting type, const u32 *a, u64 a_descriptor, u64 b_descriptor, bool add, bool n_major) {
    Tensor &t = tensor();
    Warpgroup &g = warpgroup();
    const u32 thread = worker->current->index % 128, registers = n / 2;
    if (!t.fenced) fail("wgmma: no wgmma.fence since its registers were last the thread's");
    if (t.issued - g.done >= Warpgroup::OPERATIONS) fail("wgmma: more operations under way than the emulation keeps");
    const u32 slot = u32(t.issued % Warpgroup::OPERATIONS);
    Wgmma &o = g.operations[slot];
    if (g.made == t.issued) {
        g.made++;
        g.taken[slot] = 0;
        o.type = type;
        o.n = n;
        o.a_in_registers = a != nullptr;
        o.add = add;
        o.n_major = n_major;
        o.a_descriptor = a_descriptor;
        o.b_descriptor = b_descriptor;
    } else if (o.type != type || o.n != n || o.a_in_registers != (a != nullptr) || o.add != add ||
               o.n_major != n_major || o.a_descriptor != a_descriptor || o.b_descriptor != b_descriptor) {
        fail("wgmma: threads of the warpgroup start different operations");
    }
    u32 which = 0;
    while (which < Tensor::ACCUMULATORS && t.accumulators[which].home != d) which++;
    if (which == Tensor::ACCUMULATORS)
        for (which = 0; which < Tensor::ACCUMULATORS && t.accumulators[which].home; which++) {}
    if (which == Tensor::ACCUMULATORS) fail("wgmma: more accumulators under way than the emulation keeps");
    Accumulator &c = t.accumulators[which];
    if (!c.home) {
        c.home = d;
        c.registers = registers;
        for (u32 i = 0; i < registers; i++) {
            c.value[i] = d[i];
            d[i] = __uint_as_float(0x7fffffffu);
        }
    } else if (c.registers != registers) {
        fail("wgmma: one accumulator in two shapes without a wait");
    }
    c.pending++;
    o.accumulator[thread] = which;
    for (u32 i = 0; a && i < 4; i++) o.a[thread][i] = a[i];
    g.taken[slot]++;
    t.issued++;
}

// Calls element(row, k or byte, bits) for all of an operand in shared memory.
template <class F> static void read_operand(u64 bits, u32 rows, u32 size, bool mn_major, F element) {
    using namespace wgmma_model;
    Worker &w = *worker;
    const Descriptor d(bits);
    if (d.swizzle != SWIZZLE_128 || d.base_offset != 0 || !d.rest_is_zero)
        fail("wgmma: a descriptor that is not modelled");
    const u32 per = 16 / size, K = 32 / size;
    for (u32 i = 0; i < rows * 2; i++) { // 16-byte pieces
        const u32 row = mn_major ? i / K * per : i / 2, k = mn_major ? i % K : i % 2 * per;
        const u32 address = mn_major ? wgmma_model::mn_major(d, row * size, k) : k_major(d, row, k * size);
        if (address < SHARED_BASE || address - SHARED_BASE + 16 > w.shared_size)
            fail("wgmma: an operand outside shared memory");
        const Write &write = w.writes[(address - SHARED_BASE) / 16];
        if (write.writer && write.epoch == w.fibers[write.writer - 1]->proxy_epoch)
            fail("wgmma: an operand written without a fence of the async proxy after it");
        u64 piece[2];
        read_piece(w.shared + (address - SHARED_BASE), piece);
        for (u32 e = 0; e < per; e++) {
            const u32 value = u32(piece[e * size / 8] >> 8 * (e * size % 8)) & (size == 1 ? 0xff : 0xffff);
            element(mn_major ? row + e : row, mn_major ? k : k + e, value);
        }
    }
}

static void run_wgmma(Warpgroup &g, u64 number) {
    using namespace wgmma_model;
    Worker &w = *worker;
    const u32 slot = u32(number % Warpgroup::OPERATIONS), first = w.current->index / 128 * 128;
    const Wgmma &o = g.operations[slot];
    if (g.taken[slot] != 128) fail("wgmma: not all of the warpgroup started it");
    static const std::vector<float> e4m3 = [] {
        std::vector<float> table;
        for (u32 code = 0; code < 256; code++) table.push_back(decode(code, MMA_E4M3));
        return table;
    }();
    const u32 size = o.type == MMA_E4M3 ? 1 : 2, K = 32 / size;
    auto value = [&](u32 bits) { return size == 1 ? e4m3[bits] : decode(bits, o.type); };
    if (o.a_in_registers) {
        for (u32 t = 0; t < 128; t++)
            for (u32 i = 0; i < 4; i++)
                for (u32 e = 0; e < 4 / size; e++)
                    g.a[a_row(t, i) * 32 + a_k_byte(t, i) / size + e] =
                        value(o.a[t][i] >> 8 * size * e & (size == 1 ? 0xff : 0xffff));
    } else {
        read_operand(o.a_descriptor, 64, size, false, [&](u32 row, u32 k, u32 x) { g.a[row * 32 + k] = value(x); });
    }
    read_operand(o.b_descriptor, o.n, size, o.n_major, [&](u32 row, u32 k, u32 x) { g.b[k * 256 + row] = value(x); });
    for (u32 t = 0; t < 128; t++) {
        const Accumulator &c = w.fibers[first + t]->tensor->accumulators[o.accumulator[t]];
        for (u32 i = 0; i < o.n / 2; i++) g.d[d_row(t, i) * 256 + d_column(t, i)] = o.add ? c.value[i] : 0.0f;
    }
    for (u32 row = 0; row < 64; row++) {
        if (size == 1) add_products_13_bits(g.d + row * 256, g.a + row * 32, g.b, o.n);
        else add_products(g.d + row * 256, g.a + row * 32, g.b, o.n, K);
    }
    for (u32 t = 0; t < 128; t++) {
        Accumulator &c = w.fibers[first + t]->tensor->accumulators[o.accumulator[t]];
        for (u32 i = 0; i < o.n / 2; i++) c.value[i] = g.d[d_row(t, i) * 256 + d_column(t, i)];
        c.pending--;
    }
}

// The whole warpgroup meets; the last one runs what is to be done by then. Being done is an event that all of it waits
// for: what they do next comes after the tensor core's reads.
static void meet_warpgroup(u64 target) {
    Worker &w = *worker;
    Fiber &me = *w.current;
    Warpgroup &g = warpgroup();
    if (g.arrived == 0) g.target = target;
    else if (g.target != target) fail("wgmma: threads of the warpgroup wait for different groups");
    char &order = g.order[g.generation & 1];
    if (++g.arrived == 128) {
        for (; g.done < target; g.done++) run_wgmma(g, g.done);
        order_release(order);
        g.arrived = 0;
        g.generation++;
        for (u32 i = 0; i < 128; i++) {
            Fiber &f = *w.fibers[me.index / 128 * 128 + i];
            if (f.state == IN_WARPGROUP) f.state = READY;
        }
    } else {
        me.state = IN_WARPGROUP;
        wait();
        order_acquire(order);
    }
}

void wgmma_commit() {
    Tensor &t = tensor();
    t.committed = t.issued;
    t.group_end[t.groups++ % 64] = t.issued;
    if (worker->reverse) meet_warpgroup(t.committed);
}

void wgmma_wait(u32 newest) {
    Tensor &t = tensor();
    if (t.groups <= newest) return;
    const u64 end = t.group_end[(t.groups - 1 - newest) % 64];
    if (!worker->reverse && end > warpgroup().done) meet_warpgroup(end);
    for (Accumulator &c : t.accumulators) {
        if (!c.home || c.pending) continue;
        for (u32 i = 0; i < c.registers; i++) c.home[i] = c.value[i];
        c.home = nullptr;
        t.fenced = false;
    }
}

static void fiber_main() {
#ifdef PKV_EMU_ASAN
    {
        const void *bottom;
        size_t size;
        __sanitizer_finish_switch_fiber(nullptr, &bottom, &size);
        if (!worker->main_bottom) { // the first fiber of a block is entered from the OS thread's stack
            worker->main_bottom = bottom;
            worker->main_size = size;
        }
    }
#endif
    for (;;) {
        Worker &w = *worker;
        order_acquire(w.order[BEGIN]);
        w.kernel->run(w.params);
        Fiber &me = *w.current;
        if (!me.async.empty()) fail("returned with cp.async copies not waited for");
        me.async_group = 0;
        if (me.tensor) {
            for (const Accumulator &c : me.tensor->accumulators)
                if (c.home) fail("returned with wgmma not waited for");
            me.tensor->fenced = false;
        }
        order_release(w.order[END]);
        me.state = DONE;
        if (--w.alive == 0) {
            switch_to(nullptr);
        } else {
            // Threads that have returned do not hold up a barrier.
            if (w.in_barrier == w.alive) complete_barrier();
            wait();
        }
    }
}

static void run_block(Worker &w, u64 index) {
    const uint3 at{u32(index % w.grid.x), u32(index / w.grid.x % w.grid.y), u32(index / w.grid.x / w.grid.y)};
    fill_bytes(w.shared, w.shared_size, 0xff);
    for (u32 i = 0; i < w.threads; i++) {
        Fiber &f = *w.fibers[i];
        f.place = {
            {i % w.block.x, i / w.block.x % w.block.y, i / w.block.x / w.block.y}, at, w.block, w.grid, w.shared};
        f.state = READY;
    }
    w.alive = w.threads;
    w.in_barrier = 0;
    w.count[0] = w.count[1] = 0;
    for (auto &used : w.groups_used) used = 0;
    if (w.wrote) std::fill(w.writes.begin(), w.writes.end(), Write{});
    w.wrote = false;
    order_release(w.order[BEGIN]);
    switch_to(w.fibers[w.reverse ? w.threads - 1 : 0].get());
    order_acquire(w.order[END]);
}

static u32 environment(const char *name, u32 fallback) {
    const char *value = getenv(name);
    return value && *value ? u32(strtoul(value, nullptr, 10)) : fallback;
}

void launch(const Kernel &kernel, dim3 grid, dim3 block, size_t dynamic_shared, const void *params) {
    const u64 blocks = u64(grid.x) * grid.y * grid.z;
    const u32 threads = block.x * block.y * block.z;
    const bool reverse = environment("PKV_EMU_REVERSE", 0) != 0;
    std::atomic<u64> next{0};
    auto work = [&] {
        // A worker lives as long as its OS thread's part of the launch: the fibers are made once and run block after
        // block.
        Worker w;
        w.kernel = &kernel;
        w.params = params;
        w.grid = grid;
        w.block = block;
        w.threads = threads;
        w.reverse = reverse;
        w.shared_size = dynamic_shared;
        w.writes.resize(dynamic_shared / 16 + 1);
        w.shared_raw = std::make_unique<u8[]>(dynamic_shared + 1024);
        w.shared = reinterpret_cast<u8 *>((reinterpret_cast<u64>(w.shared_raw.get()) + 1023) & ~u64(1023));
#ifdef PKV_EMU_ASAN
        __asan_poison_memory_region(w.shared_raw.get(), dynamic_shared + 1024);
        __asan_unpoison_memory_region(w.shared, dynamic_shared);
#endif
        w.groups.resize((threads + 31) / 32);
        w.groups_used.resize(w.groups.size());
        for (auto &warp : w.groups)
            for (int i = 0; i < 4; i++) warp.push_back(std::make_unique<Group>());
        Worker *outer = worker;
        worker = &w;
#ifdef PKV_EMU_TSAN
        w.main_tsan = __tsan_get_current_fiber();
#endif
        for (u32 i = 0; i < threads; i++) {
            auto f = std::make_unique<Fiber>();
            f->index = i;
            f->footing = take_footing();
            prepare(f->context, f->footing.stack, STACK, fiber_main);
            w.fibers.push_back(std::move(f));
        }
        for (u64 i; (i = next.fetch_add(1)) < blocks;) run_block(w, reverse ? blocks - 1 - i : i);
        worker = outer;
    };
    u64 workers = environment("PKV_EMU_THREADS", 2);
    if (workers > blocks) workers = blocks;
    std::vector<std::thread> others;
    for (u64 i = 1; i < workers; i++) others.emplace_back(work);
    work();
    for (auto &t : others) t.join();
}

} // namespace pkv_emu
