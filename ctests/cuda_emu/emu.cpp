// Fibers, meetings, launches. Compiled without -fsanitize=thread even in a race-detecting build (PKV_EMU_TSAN is then
// defined): the bookkeeping here is ordered by construction, and only the kernels' own accesses are to be judged.
#include "emu.h"

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
    u32 group;
};

enum State : u8 { DONE, READY, IN_BARRIER, IN_MEETING };

struct Fiber {
    Context context;
    Place place;
    State state = DONE;
    Meeting meeting;
    u32 mask, index;
    u64 generation;
    u32 async_group = 0;
    std::vector<AsyncCopy> async;
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
            if (f.state == IN_BARRIER || f.state == IN_MEETING)
                fprintf(stderr, "cuda_emu: thread %u waits in %s (kind %u, mask %08x)\n", i,
                        f.state == IN_BARRIER ? "__syncthreads" : "a warp operation",
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

void cp_async_16(void *smem, const void *gmem, bool valid) {
    if ((reinterpret_cast<u64>(smem) | reinterpret_cast<u64>(gmem)) & 15) fail("cp.async: address not 16-byte aligned");
    Fiber &me = *worker->current;
    me.async.push_back({smem, gmem, valid, me.async_group});
}
void cp_async_commit() { worker->current->async_group++; }
// The copies themselves are in async_copy.cpp, which is compiled with the sanitizers: they are the kernel's accesses.
void async_copy_16(void *to, const void *from, bool valid);
void cp_async_wait(u32 newest) {
    Fiber &me = *worker->current;
    size_t done = 0;
    while (done < me.async.size() && me.async[done].group + newest < me.async_group) {
        async_copy_16(me.async[done].to, me.async[done].from, me.async[done].valid);
        done++;
    }
    me.async.erase(me.async.begin(), me.async.begin() + ptrdiff_t(done));
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
