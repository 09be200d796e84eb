// A fake CUDA driver, `libcuda.so.1`, for tests without a GPU: the calls a library makes, over the emulation in
// emu.cpp.
//
// Kernels run at the launch, to the end, whatever the stream. Device memory lies in its own address range, closed to
// everybody except while a kernel or a copy runs: a host access to a device pointer is a segmentation fault. Every
// allocation ends at a closed page (up to its alignment of 256; the bytes between are checked when it is freed), and
// no address is given out twice. New memory is filled with 0xff.
//
// An image is what fake_nvrtc.cpp makes: "PKVEMU1 <source file> <kind><arch> <hash>\n" (kind sm_ or compute_); it holds
// the entry points that the emulation compiled from that file. Or a fatbin of nvcc's with machine code or PTX that
// would run on the device: it holds every entry point, since which file it came from cannot be told. Anything else is
// CUDA_ERROR_INVALID_IMAGE.
//
// Environment
//   PKV_EMU_DEVICES=n     devices (default 1); 0: cuInit says CUDA_ERROR_NO_DEVICE
//   PKV_EMU_ARCH=90       compute capability of the devices (major times 10 plus minor)
//   PKV_EMU_BLOCKS=n      kernels that walk their rows with the grid's stride get at most n blocks, as they would with
//                         more than 2^31 blocks' worth of rows
//   PKV_EMU_FAIL=SPEC     SPEC is name=n:code, more after commas: the n-th call of that function fails with the code
// Beside the driver's own: pkv_emu_inject(SPEC) at run time, pkv_emu_count(name) calls of a function so far,
// pkv_emu_count("allocations") now alive, ("contexts") references to primary contexts, ("overruns") found at frees,
// ("kernels not launched") of those in kernels/, which are named on stderr; of the files *_sm90.cu if
// PAGEDKV_CUDA_KERNELS is hopper, else of the others; ("kernels of *_sm90.cu launched").
#include "emu.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <vector>
#ifdef PKV_EMU_ASAN
#include <sanitizer/asan_interface.h>
#endif

using Result = int;
using Pointer = unsigned long long;
enum : Result {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
};

namespace {

std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

std::map<std::string, long> calls;
std::set<const pkv_emu::Kernel *> launched;
std::map<std::string, std::map<long, Result>> planned;
bool initialized = false;
long overruns = 0;

long environment(const char *name, long fallback) {
    const char *value = getenv(name);
    return value && *value ? strtol(value, nullptr, 10) : fallback;
}

void inject(const char *spec) {
    while (spec && *spec) {
        char name[64];
        long nth;
        int code, used = 0;
        if (sscanf(spec, "%63[^=]=%ld:%d%n", name, &nth, &code, &used) != 3) abort();
        planned[name][calls[name] + nth] = code;
        spec += used + (spec[used] == ',');
    }
}

// Counts the call; the planned failure, if this call has one.
Result enter(const char *name, bool needs_init = true) {
    Lock lock(mutex);
    const long n = ++calls[name];
    auto function = planned.find(name);
    if (function != planned.end()) {
        auto call = function->second.find(n);
        if (call != function->second.end()) return call->second;
    }
    return needs_init && !initialized ? NOT_INITIALIZED : OK;
}
#define ENTER(name)                                                                                                    \
    if (const Result failed = enter(#name)) return failed

// ---- contexts ----

struct Context {
    int device, references = 0;
};
std::vector<std::unique_ptr<Context>> contexts;
thread_local std::vector<Context *> current;

#define NEED_CONTEXT                                                                                                   \
    if (current.empty()) return INVALID_CONTEXT

// ---- memory ----

constexpr u64 RANGE = u64(1) << 38, PAGE = 4096, ALIGNMENT = 256;
u8 *range, *range_end, *range_next;

struct Allocation {
    u8 *pages;
    size_t pages_size, size;
};
std::map<Pointer, Allocation> allocations;
int open_count = 0;

void open_memory() {
    Lock lock(mutex);
    if (open_count++ == 0)
        for (auto &[p, a] : allocations) mprotect(a.pages, a.pages_size, PROT_READ | PROT_WRITE);
}
void close_memory() {
    Lock lock(mutex);
    if (--open_count == 0)
        for (auto &[p, a] : allocations) mprotect(a.pages, a.pages_size, PROT_NONE);
}
struct Open {
    Open() { open_memory(); }
    ~Open() { close_memory(); }
};

Result allocate(Pointer *out, size_t size) {
    if (!out || size == 0) return INVALID_VALUE;
    Lock lock(mutex);
    if (!range) {
        void *p = mmap(nullptr, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) return OUT_OF_MEMORY;
        range = range_next = static_cast<u8 *>(p);
        range_end = range + RANGE;
    }
    const size_t rounded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const size_t pages = (rounded + PAGE - 1) / PAGE * PAGE;
    if (size > RANGE || size_t(range_end - range_next) < pages + PAGE) return OUT_OF_MEMORY;
    u8 *base = range_next;
    if (mprotect(base, pages, PROT_READ | PROT_WRITE) != 0) return OUT_OF_MEMORY;
    range_next += pages + PAGE; // the page between stays closed
    u8 *start = base + (pages - rounded);
    memset(start, 0xff, rounded);
#ifdef PKV_EMU_ASAN
    __asan_poison_memory_region(base, start - base);
    __asan_unpoison_memory_region(start, size);
    __asan_poison_memory_region(start + size, rounded - size);
#endif
    if (open_count == 0) mprotect(base, pages, PROT_NONE);
    allocations[reinterpret_cast<Pointer>(start)] = {base, pages, size};
    *out = reinterpret_cast<Pointer>(start);
    return OK;
}

Result release(Pointer p) {
    if (!p) return OK;
    Lock lock(mutex);
    auto found = allocations.find(p);
    if (found == allocations.end()) return INVALID_VALUE;
    const Allocation &a = found->second;
    mprotect(a.pages, a.pages_size, PROT_READ | PROT_WRITE);
#ifdef PKV_EMU_ASAN
    __asan_unpoison_memory_region(a.pages, a.pages_size);
#endif
    for (u8 *end = a.pages + a.pages_size, *b = reinterpret_cast<u8 *>(p) + a.size; b < end; b++)
        if (*b != 0xff) {
            fprintf(stderr, "fake driver: allocation of %zu bytes overrun at +%zu\n", a.size,
                    size_t(b - reinterpret_cast<u8 *>(p)));
            overruns++;
            break;
        }
    madvise(a.pages, a.pages_size, MADV_DONTNEED);
    mprotect(a.pages, a.pages_size, PROT_NONE);
    allocations.erase(found);
    return OK;
}

bool device_range(Pointer p, size_t size) {
    Lock lock(mutex);
    auto after = allocations.upper_bound(p);
    if (after == allocations.begin()) return false;
    auto &[start, a] = *--after;
    return p >= start && p - start <= a.size && size <= a.size - (p - start);
}

// ---- streams, graphs ----

using Node = std::function<Result()>;
struct Graph {
    std::vector<Node> nodes;
};
struct Stream {
    std::unique_ptr<Graph> capture;
    bool invalidated = false;
    int mode = 0;
};
struct Event {
    std::chrono::steady_clock::time_point at;
    bool recorded = false;
};
std::vector<Stream *> capturing;
thread_local int thread_capture_mode = 0; // 0 global, 1 thread local, 2 relaxed

// Calls that a stream capture in global mode forbids, from a thread that has not relaxed its mode.
bool forbidden_by_capture() {
    Lock lock(mutex);
    bool forbidden = false;
    for (Stream *s : capturing)
        if (s->mode == 0 && thread_capture_mode != 2) forbidden = s->invalidated = true;
    return forbidden;
}

Result submit(Stream *stream, Node node) {
    {
        Lock lock(mutex);
        if (stream && stream->capture) {
            if (stream->invalidated) return CAPTURE_INVALIDATED;
            stream->capture->nodes.push_back(std::move(node));
            return OK;
        }
        if (!stream) // the legacy stream would wait for a capturing one
            for (Stream *s : capturing)
                if (s->mode == 0) {
                    s->invalidated = true;
                    return CAPTURE_UNSUPPORTED;
                }
    }
    return node();
}

// ---- images ----

struct Library;
struct Function {
    const pkv_emu::Kernel *kernel;
    std::atomic<u32> max_dynamic_shared{48 << 10};
};
struct Library {
    std::string file;
    std::map<std::string, std::unique_ptr<Function>> functions;
};

int arch() { return int(environment("PKV_EMU_ARCH", 90)); }

// Whether one of a fatbin's entries runs on the device: machine code of its major version and at most its minor, or PTX
// of at most its version. (Code for sm_90a and the like is not told from sm_90's.)
bool fatbin_runs(const u8 *image) {
    u64 size;
    u16 header;
    memcpy(&header, image + 6, 2);
    memcpy(&size, image + 8, 8);
    for (const u8 *at = image + header, *end = at + size; at < end;) {
        u16 kind;
        u32 entry_header, built_for;
        u64 payload;
        memcpy(&kind, at, 2);
        memcpy(&entry_header, at + 4, 4);
        memcpy(&payload, at + 8, 8);
        memcpy(&built_for, at + 28, 4);
        const bool ptx = kind == 1;
        if (int(built_for) <= arch() && (ptx || int(built_for / 10) == arch() / 10)) return true;
        at += entry_header + payload;
    }
    return false;
}

Result load(Library **out, const void *image) {
    if (!image || !out) return INVALID_VALUE;
    if (forbidden_by_capture()) return CAPTURE_UNSUPPORTED;
    constexpr u32 FATBIN = 0xba55ed50;
    if (memcmp(image, &FATBIN, 4) == 0) {
        if (!fatbin_runs(static_cast<const u8 *>(image))) return NO_BINARY_FOR_GPU;
        *out = new Library{"", {}};
        return OK;
    }
    if (memcmp(image, "PKVEMU1 ", 8) != 0) return INVALID_IMAGE;
    char file[128], kind[16];
    int built_for = 0;
    if (sscanf(static_cast<const char *>(image), "PKVEMU1 %127s %15[a-z_]%d", file, kind, &built_for) != 3)
        return INVALID_IMAGE;
    const bool ptx = strcmp(kind, "compute_") == 0;
    if (ptx ? built_for > arch() : built_for != arch()) return NO_BINARY_FOR_GPU;
    if (!pkv_emu::has_kernels_of(file)) return INVALID_IMAGE;
    *out = new Library{file, {}};
    return OK;
}

Result find(Function **out, Library *library, const char *name) {
    const pkv_emu::Kernel *kernel = pkv_emu::find_kernel(name, library->file.empty() ? nullptr : library->file.c_str());
    if (!kernel) return NOT_FOUND;
    Lock lock(mutex);
    auto &f = library->functions[name];
    if (!f) {
        f = std::make_unique<Function>();
        f->kernel = kernel;
    }
    *out = f.get();
    return OK;
}

Result launch(Function *f, dim3 grid, dim3 block, u32 shared, Stream *stream, void **params, void **extra) {
    if (!f) return INVALID_HANDLE;
    if (!params || extra) return INVALID_VALUE;
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || block.x == 0 || block.y == 0 || block.z == 0) return INVALID_VALUE;
    if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) return INVALID_VALUE;
    if (block.x > 1024 || block.y > 1024 || block.z > 64 || u64(block.x) * block.y * block.z > f->kernel->max_threads)
        return INVALID_VALUE;
    if (shared > f->max_dynamic_shared) return INVALID_VALUE;
    for (const char *walks : {"kv_store_", "kv_gather_", "merge_attention_", "mla_rope_", "mla_prefill_fp8_latent_",
                              "mla_prefill_fp8_project_sm90"})
        if (strncmp(f->kernel->name, walks, strlen(walks)) == 0)
            grid.x = u32(std::min<long>(grid.x, environment("PKV_EMU_BLOCKS", 0x7fffffff)));
    const u8 *bytes = static_cast<const u8 *>(params[0]);
    std::vector<u8> copy(bytes, bytes + f->kernel->params_size);
    return submit(stream, [=, copy = std::move(copy)] {
        Open open;
        alignas(16) u8 aligned[4096];
        if (copy.size() > sizeof aligned) return Result(INVALID_VALUE);
        memcpy(aligned, copy.data(), copy.size());
        {
            Lock lock(mutex);
            launched.insert(f->kernel);
        }
        pkv_emu::launch(*f->kernel, grid, block, shared, aligned);
        return Result(OK);
    });
}

Result copy(Stream *stream, void *to, const void *from, size_t size, bool to_device, bool from_device) {
    if (size == 0) return OK;
    if (to_device && !device_range(reinterpret_cast<Pointer>(to), size)) return INVALID_VALUE;
    if (from_device && !device_range(reinterpret_cast<Pointer>(from), size)) return INVALID_VALUE;
    return submit(stream, [=] {
        Open open;
        memmove(to, from, size);
        return Result(OK);
    });
}

template <class T> Result fill(Stream *stream, Pointer p, T value, size_t count) {
    if (count == 0) return OK;
    if (!device_range(p, count * sizeof(T))) return INVALID_VALUE;
    return submit(stream, [=] {
        Open open;
        T *t = reinterpret_cast<T *>(p);
        for (size_t i = 0; i < count; i++) t[i] = value;
        return Result(OK);
    });
}

const char *error_name(Result code) {
    switch (code) {
    case OK: return "CUDA_SUCCESS";
    case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
    case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
    case NOT_INITIALIZED: return "CUDA_ERROR_NOT_INITIALIZED";
    case NO_DEVICE: return "CUDA_ERROR_NO_DEVICE";
    case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
    case INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
    case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
    case NO_BINARY_FOR_GPU: return "CUDA_ERROR_NO_BINARY_FOR_GPU";
    case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
    case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
    case NOT_READY: return "CUDA_ERROR_NOT_READY";
    case 700: return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case 719: return "CUDA_ERROR_LAUNCH_FAILED";
    case CAPTURE_UNSUPPORTED: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
    case CAPTURE_INVALIDATED: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
    }
    return nullptr;
}

} // namespace

extern "C" {

void pkv_emu_inject(const char *spec) {
    Lock lock(mutex);
    inject(spec);
}
long pkv_emu_count(const char *name) {
    Lock lock(mutex);
    const std::string what = name;
    if (what == "allocations") return long(allocations.size());
    if (what == "overruns") return overruns;
    if (what == "kernels not launched") {
        long n = 0;
        const char *siblings = getenv("PAGEDKV_CUDA_KERNELS");
        const bool hopper = siblings && strcmp(siblings, "hopper") == 0;
        for (const pkv_emu::Kernel *k = pkv_emu::first_kernel(); k; k = k->next)
            if (strstr(k->file, "kernels/") && (strstr(k->file, "_sm90.cu") != nullptr) == hopper &&
                !launched.count(k)) {
                fprintf(stderr, "not launched: %s\n", k->name);
                n++;
            }
        return n;
    }
    if (what == "kernels of *_sm90.cu launched")
        return std::count_if(launched.begin(), launched.end(),
                             [](const pkv_emu::Kernel *k) { return strstr(k->file, "_sm90.cu") != nullptr; });
    if (what == "contexts") {
        long n = 0;
        for (auto &c : contexts) n += c->references;
        return n;
    }
    return calls[what];
}

Result cuInit(unsigned flags) {
    Lock lock(mutex);
    if (!initialized) inject(getenv("PKV_EMU_FAIL"));
    if (const Result failed = enter("cuInit", false)) return failed;
    if (flags != 0) return INVALID_VALUE;
    const long devices = environment("PKV_EMU_DEVICES", 1);
    if (devices == 0) return NO_DEVICE;
    if (!initialized)
        for (long i = 0; i < devices; i++) contexts.push_back(std::make_unique<Context>(Context{int(i)}));
    initialized = true;
    return OK;
}
Result cuDriverGetVersion(int *version) {
    if (const Result failed = enter("cuDriverGetVersion", false)) return failed;
    *version = 13000;
    return OK;
}
Result cuGetErrorName(Result code, const char **name) {
    *name = error_name(code);
    return *name ? OK : INVALID_VALUE;
}
Result cuGetErrorString(Result code, const char **text) {
    *text = error_name(code) ? "an error of the fake driver" : nullptr;
    return *text ? OK : INVALID_VALUE;
}

Result cuDeviceGetCount(int *count) {
    ENTER(cuDeviceGetCount);
    *count = int(contexts.size());
    return OK;
}
Result cuDeviceGet(int *device, int ordinal) {
    ENTER(cuDeviceGet);
    if (ordinal < 0 || size_t(ordinal) >= contexts.size()) return INVALID_DEVICE;
    *device = ordinal;
    return OK;
}
Result cuDeviceGetName(char *name, int size, int) {
    ENTER(cuDeviceGetName);
    snprintf(name, size_t(size), "Emulated device");
    return OK;
}
Result cuDeviceTotalMem_v2(size_t *bytes, int) {
    ENTER(cuDeviceTotalMem_v2);
    *bytes = RANGE;
    return OK;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER(cuDeviceGetAttribute);
    if (device < 0 || size_t(device) >= contexts.size()) return INVALID_DEVICE;
    static const std::map<int, int> values = {
        {1, 1024},      {2, 1024},  {3, 1024},       {4, 64},         {5, 0x7fffffff}, {6, 65535},    {7, 65535},
        {8, 48 << 10},  {10, 32},   {12, 65536},     {13, 1755000},   {16, 132},       {36, 2619000}, {37, 5120},
        {38, 50 << 20}, {39, 2048}, {81, 228 << 10}, {97, 227 << 10}, {115, 1},
    };
    if (attribute == 75) *value = arch() / 10;
    else if (attribute == 76) *value = arch() % 10;
    else if (auto found = values.find(attribute); found != values.end()) *value = found->second;
    else return INVALID_VALUE;
    return OK;
}

Result cuDevicePrimaryCtxRetain(Context **out, int device) {
    ENTER(cuDevicePrimaryCtxRetain);
    Lock lock(mutex);
    if (device < 0 || size_t(device) >= contexts.size()) return INVALID_DEVICE;
    contexts[size_t(device)]->references++;
    *out = contexts[size_t(device)].get();
    return OK;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(cuDevicePrimaryCtxRelease_v2);
    Lock lock(mutex);
    if (device < 0 || size_t(device) >= contexts.size()) return INVALID_DEVICE;
    if (contexts[size_t(device)]->references == 0) return INVALID_CONTEXT;
    contexts[size_t(device)]->references--;
    return OK;
}
Result cuCtxPushCurrent_v2(Context *context) {
    ENTER(cuCtxPushCurrent_v2);
    if (!context || context->references == 0) return INVALID_CONTEXT;
    current.push_back(context);
    return OK;
}
Result cuCtxPopCurrent_v2(Context **out) {
    ENTER(cuCtxPopCurrent_v2);
    NEED_CONTEXT;
    if (out) *out = current.back();
    current.pop_back();
    return OK;
}
Result cuCtxGetCurrent(Context **out) {
    ENTER(cuCtxGetCurrent);
    *out = current.empty() ? nullptr : current.back();
    return OK;
}
Result cuCtxSetCurrent(Context *context) {
    ENTER(cuCtxSetCurrent);
    if (!current.empty()) current.pop_back();
    if (context) current.push_back(context);
    return OK;
}
Result cuCtxGetDevice(int *device) {
    ENTER(cuCtxGetDevice);
    NEED_CONTEXT;
    *device = current.back()->device;
    return OK;
}
Result cuCtxSynchronize() {
    ENTER(cuCtxSynchronize);
    NEED_CONTEXT;
    return forbidden_by_capture() ? CAPTURE_UNSUPPORTED : OK;
}

Result cuLibraryLoadData(Library **out, const void *image, void *, void **, unsigned, void *, void **, unsigned) {
    ENTER(cuLibraryLoadData);
    return load(out, image);
}
Result cuLibraryUnload(Library *library) {
    ENTER(cuLibraryUnload);
    delete library;
    return OK;
}
Result cuLibraryGetKernel(Function **out, Library *library, const char *name) {
    ENTER(cuLibraryGetKernel);
    return find(out, library, name);
}
Result cuKernelGetFunction(Function **out, Function *kernel) {
    ENTER(cuKernelGetFunction);
    NEED_CONTEXT;
    *out = kernel;
    return OK;
}
Result cuModuleLoadData(Library **out, const void *image) {
    ENTER(cuModuleLoadData);
    NEED_CONTEXT;
    return load(out, image);
}
Result cuModuleLoadDataEx(Library **out, const void *image, unsigned, void *, void **) {
    ENTER(cuModuleLoadDataEx);
    NEED_CONTEXT;
    return load(out, image);
}
Result cuModuleUnload(Library *library) {
    ENTER(cuModuleUnload);
    delete library;
    return OK;
}
Result cuModuleGetFunction(Function **out, Library *library, const char *name) {
    ENTER(cuModuleGetFunction);
    NEED_CONTEXT;
    return find(out, library, name);
}
Result cuFuncSetAttribute(Function *f, int attribute, int value) {
    ENTER(cuFuncSetAttribute);
    if (!f) return INVALID_HANDLE;
    if (attribute == 8) {
        if (value < 0 || value > (227 << 10)) return INVALID_VALUE;
        f->max_dynamic_shared = u32(value);
    }
    return OK;
}
Result cuFuncGetAttribute(int *value, int attribute, Function *f) {
    ENTER(cuFuncGetAttribute);
    if (!f) return INVALID_HANDLE;
    *value = attribute == 0 ? int(f->kernel->max_threads) : attribute == 8 ? int(f->max_dynamic_shared) : 0;
    return OK;
}
Result cuLaunchKernel(Function *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, Stream *stream, void **params, void **extra) {
    ENTER(cuLaunchKernel);
    NEED_CONTEXT;
    return launch(f, {gx, gy, gz}, {bx, by, bz}, shared, stream, params, extra);
}
struct LaunchConfig {
    unsigned gx, gy, gz, bx, by, bz, shared;
    Stream *stream;
    void *attributes;
    unsigned num_attributes;
};
Result cuLaunchKernelEx(const LaunchConfig *c, Function *f, void **params, void **extra) {
    ENTER(cuLaunchKernelEx);
    NEED_CONTEXT;
    return launch(f, {c->gx, c->gy, c->gz}, {c->bx, c->by, c->bz}, c->shared, c->stream, params, extra);
}

Result cuMemAlloc_v2(Pointer *out, size_t size) {
    ENTER(cuMemAlloc_v2);
    NEED_CONTEXT;
    if (forbidden_by_capture()) return CAPTURE_UNSUPPORTED;
    return allocate(out, size);
}
Result cuMemFree_v2(Pointer p) {
    ENTER(cuMemFree_v2);
    NEED_CONTEXT;
    if (forbidden_by_capture()) return CAPTURE_UNSUPPORTED;
    return release(p);
}
Result cuMemAllocAsync(Pointer *out, size_t size, Stream *) {
    ENTER(cuMemAllocAsync);
    NEED_CONTEXT;
    return allocate(out, size); // under capture the memory stays as long as the process: graphs may replay with it
}
Result cuMemFreeAsync(Pointer p, Stream *stream) {
    ENTER(cuMemFreeAsync);
    NEED_CONTEXT;
    if (stream && stream->capture) return OK;
    return release(p);
}
Result cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER(cuMemGetInfo_v2);
    NEED_CONTEXT;
    *free = range ? size_t(range_end - range_next) : RANGE;
    *total = RANGE;
    return OK;
}
Result cuMemHostAlloc(void **out, size_t size, unsigned) {
    ENTER(cuMemHostAlloc);
    *out = malloc(size);
    return *out ? OK : OUT_OF_MEMORY;
}
Result cuMemFreeHost(void *p) {
    ENTER(cuMemFreeHost);
    free(p);
    return OK;
}
Result cuMemcpyHtoD_v2(Pointer to, const void *from, size_t size) {
    ENTER(cuMemcpyHtoD_v2);
    NEED_CONTEXT;
    return copy(nullptr, reinterpret_cast<void *>(to), from, size, true, false);
}
Result cuMemcpyDtoH_v2(void *to, Pointer from, size_t size) {
    ENTER(cuMemcpyDtoH_v2);
    NEED_CONTEXT;
    return copy(nullptr, to, reinterpret_cast<const void *>(from), size, false, true);
}
Result cuMemcpyDtoD_v2(Pointer to, Pointer from, size_t size) {
    ENTER(cuMemcpyDtoD_v2);
    NEED_CONTEXT;
    return copy(nullptr, reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size, true, true);
}
Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t size, Stream *stream) {
    ENTER(cuMemcpyHtoDAsync_v2);
    NEED_CONTEXT;
    return copy(stream, reinterpret_cast<void *>(to), from, size, true, false);
}
Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t size, Stream *stream) {
    ENTER(cuMemcpyDtoHAsync_v2);
    NEED_CONTEXT;
    return copy(stream, to, reinterpret_cast<const void *>(from), size, false, true);
}
Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t size, Stream *stream) {
    ENTER(cuMemcpyDtoDAsync_v2);
    NEED_CONTEXT;
    return copy(stream, reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size, true, true);
}
Result cuMemsetD8_v2(Pointer p, unsigned char value, size_t count) {
    ENTER(cuMemsetD8_v2);
    NEED_CONTEXT;
    return fill(nullptr, p, value, count);
}
Result cuMemsetD8Async(Pointer p, unsigned char value, size_t count, Stream *stream) {
    ENTER(cuMemsetD8Async);
    NEED_CONTEXT;
    return fill(stream, p, value, count);
}
Result cuMemsetD32_v2(Pointer p, unsigned value, size_t count) {
    ENTER(cuMemsetD32_v2);
    NEED_CONTEXT;
    return fill(nullptr, p, value, count);
}
Result cuMemsetD32Async(Pointer p, unsigned value, size_t count, Stream *stream) {
    ENTER(cuMemsetD32Async);
    NEED_CONTEXT;
    return fill(stream, p, value, count);
}

Result cuStreamCreate(Stream **out, unsigned) {
    ENTER(cuStreamCreate);
    NEED_CONTEXT;
    *out = new Stream;
    return OK;
}
Result cuStreamDestroy_v2(Stream *stream) {
    ENTER(cuStreamDestroy_v2);
    Lock lock(mutex);
    std::erase(capturing, stream);
    delete stream;
    return OK;
}
Result cuStreamSynchronize(Stream *stream) {
    ENTER(cuStreamSynchronize);
    if (stream && stream->capture) {
        stream->invalidated = true;
        return CAPTURE_UNSUPPORTED;
    }
    return forbidden_by_capture() ? CAPTURE_UNSUPPORTED : OK;
}
Result cuStreamQuery(Stream *) {
    ENTER(cuStreamQuery);
    return OK;
}
Result cuStreamWaitEvent(Stream *, Event *, unsigned) {
    ENTER(cuStreamWaitEvent);
    return OK;
}
Result cuStreamBeginCapture_v2(Stream *stream, int mode) {
    ENTER(cuStreamBeginCapture_v2);
    Lock lock(mutex);
    if (!stream || stream->capture) return INVALID_VALUE;
    stream->capture = std::make_unique<Graph>();
    stream->invalidated = false;
    stream->mode = mode;
    capturing.push_back(stream);
    return OK;
}
Result cuStreamEndCapture(Stream *stream, Graph **out) {
    ENTER(cuStreamEndCapture);
    Lock lock(mutex);
    if (!stream || !stream->capture) return INVALID_VALUE;
    std::erase(capturing, stream);
    *out = stream->capture.release();
    if (!stream->invalidated) return OK;
    delete *out;
    *out = nullptr;
    return CAPTURE_INVALIDATED;
}
Result cuStreamIsCapturing(Stream *stream, int *status) {
    ENTER(cuStreamIsCapturing);
    *status = !stream || !stream->capture ? 0 : stream->invalidated ? 2 : 1;
    return OK;
}
Result cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER(cuThreadExchangeStreamCaptureMode);
    std::swap(*mode, thread_capture_mode);
    return OK;
}
Result cuGraphGetNodes(Graph *graph, void **, size_t *count) {
    ENTER(cuGraphGetNodes);
    *count = graph->nodes.size();
    return OK;
}
Result cuGraphInstantiateWithFlags(Graph **out, Graph *graph, unsigned long long) {
    ENTER(cuGraphInstantiateWithFlags);
    *out = new Graph(*graph);
    return OK;
}
Result cuGraphLaunch(Graph *graph, Stream *) {
    ENTER(cuGraphLaunch);
    for (auto &node : graph->nodes)
        if (const Result failed = node()) return failed;
    return OK;
}
Result cuGraphExecDestroy(Graph *graph) {
    ENTER(cuGraphExecDestroy);
    delete graph;
    return OK;
}
Result cuGraphDestroy(Graph *graph) {
    ENTER(cuGraphDestroy);
    delete graph;
    return OK;
}

Result cuEventCreate(Event **out, unsigned) {
    ENTER(cuEventCreate);
    *out = new Event;
    return OK;
}
Result cuEventDestroy_v2(Event *event) {
    ENTER(cuEventDestroy_v2);
    delete event;
    return OK;
}
Result cuEventRecord(Event *event, Stream *) {
    ENTER(cuEventRecord);
    event->at = std::chrono::steady_clock::now();
    event->recorded = true;
    return OK;
}
Result cuEventSynchronize(Event *) {
    ENTER(cuEventSynchronize);
    return OK;
}
Result cuEventElapsedTime(float *milliseconds, Event *start, Event *end) {
    ENTER(cuEventElapsedTime);
    if (!start->recorded || !end->recorded) return INVALID_HANDLE;
    *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
    return OK;
}
Result cuEventElapsedTime_v2(float *milliseconds, Event *start, Event *end) {
    return cuEventElapsedTime(milliseconds, start, end);
}

} // extern "C"
