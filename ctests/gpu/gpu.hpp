// What the GPU tests and the benchmark share: the driver, opened at run time, device memory between canaries, and one
// Scene: a ragged batch over paged collections, with a call of every function that has CUDA kernels, on the CPU and on
// the GPU over the same bytes.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pagedkv.h"

namespace gpu {

using Ptr = unsigned long long;

[[noreturn]] inline void die(const std::string &what) {
    printf("FAILED: %s\n", what.c_str());
    exit(1);
}

// ---- the driver ----

inline void *library() {
    static void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    return handle;
}
template <class... A> int call(const char *name, A... arguments) {
    void *found = dlsym(library(), name);
    if (!found) die(std::string("the driver has no ") + name);
    int (*function)(A...);
    memcpy(&function, &found, sizeof function);
    return function(arguments...);
}
template <class... A> void must(const char *name, A... arguments) {
    const int code = call(name, arguments...);
    if (code != 0) die(std::string(name) + ": error " + std::to_string(code));
}

// Exit status 77 where there is no driver or no device.
inline std::string open_device() {
    void *context = nullptr;
    char name[256] = "";
    if (!library()) {
        printf("no NVIDIA driver on this machine\n");
        exit(77);
    }
    if (call("cuInit", 0u) || call("cuDevicePrimaryCtxRetain", &context, 0) || call("cuCtxSetCurrent", context)) {
        printf("no usable NVIDIA GPU on this machine\n");
        exit(77);
    }
    must("cuDeviceGetName", &name[0], int(sizeof name), 0);
    return name;
}
inline int attribute(int which) {
    int value = 0;
    must("cuDeviceGetAttribute", &value, which, 0);
    return value;
}
inline void synchronize() { must("cuCtxSynchronize"); }
// The device of the tests without a GPU is slow: fewer rounds there.
inline bool emulated() { return dlsym(library(), "pkv_emu_count") != nullptr; }

struct Stream {
    void *native = nullptr;
    Stream() { must("cuStreamCreate", &native, 1u); }
    ~Stream() { call("cuStreamDestroy_v2", native); }
    Stream(const Stream &) = delete;
};

struct Event {
    void *native = nullptr;
    Event() { must("cuEventCreate", &native, 0u); }
    ~Event() { call("cuEventDestroy_v2", native); }
    Event(const Event &) = delete;
    void record(const Stream &s) { must("cuEventRecord", native, s.native); }
};
inline double milliseconds(Event &from, Event &to) {
    float ms = 0;
    must("cuEventSynchronize", to.native);
    must(dlsym(library(), "cuEventElapsedTime_v2") ? "cuEventElapsedTime_v2" : "cuEventElapsedTime", &ms, from.native,
         to.native);
    return ms;
}

// Device memory with a canary on either side.
class Memory {
public:
#ifdef __SANITIZE_ADDRESS__
    static constexpr size_t GUARD = 0; // AddressSanitizer watches the ends, reads too
#else
    static constexpr size_t GUARD = 4096;
#endif
    explicit Memory(size_t bytes) : size(bytes) {
        const size_t whole = std::max<size_t>(bytes + 2 * GUARD, 1);
        must("cuMemAlloc_v2", &base, whole);
        must("cuMemsetD8_v2", base, (unsigned char)0xa5, whole);
    }
    ~Memory() { call("cuMemFree_v2", base); }
    Memory(const Memory &) = delete;
    void *data() const { return reinterpret_cast<void *>(uintptr_t(base + GUARD)); }
    void upload(const void *from) const {
        if (size) must("cuMemcpyHtoD_v2", base + GUARD, from, size);
    }
    std::vector<unsigned char> download() const {
        std::vector<unsigned char> bytes(size);
        if (size) must("cuMemcpyDtoH_v2", static_cast<void *>(bytes.data()), base + GUARD, size);
        return bytes;
    }
    void fill(unsigned char value) const {
        if (size) must("cuMemsetD8_v2", base + GUARD, value, size);
    }
    bool canaries_whole() const {
        std::vector<unsigned char> all(size + 2 * GUARD);
        if (GUARD == 0) return true;
        must("cuMemcpyDtoH_v2", static_cast<void *>(all.data()), base, all.size());
        for (size_t i = 0; i < GUARD; i++)
            if (all[i] != 0xa5 || all[GUARD + size + i] != 0xa5) return false;
        return true;
    }
    const size_t size;

private:
    Ptr base = 0;
};

// ---- numbers ----

struct Random {
    uint64_t state;
    uint64_t next() {
        state += 0x9e3779b97f4a7c15u;
        uint64_t x = state;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
    }
    uint32_t below(uint32_t n) { return uint32_t(next() % (n ? n : 1)); }
    float unit() { return float(next() >> 40) / 8388608.0f - 1.0f; }
};

inline size_t size_of(int32_t dtype) {
    switch (dtype) {
    case PKV_F32:
    case PKV_I32: return 4;
    case PKV_F16:
    case PKV_BF16: return 2;
    default: return 1;
    }
}

inline float decode(const unsigned char *p, int32_t dtype) {
    uint32_t bits = 0;
    float x;
    memcpy(&bits, p, size_of(dtype));
    auto small = [&](int exponent, int mantissa) { // sign, exponent, mantissa with the usual bias
        const int e = int(bits >> mantissa) & ((1 << exponent) - 1), bias = (1 << (exponent - 1)) - 1;
        const float m = float(bits & ((1u << mantissa) - 1)) / float(1 << mantissa);
        const float value = e ? std::ldexp(1 + m, e - bias) : std::ldexp(m, 1 - bias);
        return bits >> (exponent + mantissa) & 1 ? -value : value;
    };
    switch (dtype) {
    case PKV_F16:
        return (bits & 0x7c00) == 0x7c00 ? (bits & 0x3ff ? NAN : bits & 0x8000 ? -INFINITY : INFINITY) : small(5, 10);
    case PKV_F8_E4M3: return (bits & 0x7f) == 0x7f ? NAN : small(4, 3);
    case PKV_F8_E5M2: return small(5, 2);
    case PKV_F8_E8M0: return std::ldexp(1.0f, int(bits) - 127);
    case PKV_BF16: bits <<= 16; break;
    default: break;
    }
    memcpy(&x, &bits, 4);
    return x;
}

// Nearest or nearly so: inputs need no more.
inline void encode(unsigned char *p, int32_t dtype, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    auto small = [&](int exponent, int mantissa) {
        const int bias = (1 << (exponent - 1)) - 1, e = int(bits >> 23 & 255) - 127 + bias;
        const uint32_t sign = bits >> 31 << (exponent + mantissa);
        if (e <= 0) return sign;
        return sign | uint32_t(std::min(e, (1 << exponent) - 2)) << mantissa | (bits & 0x7fffff) >> (23 - mantissa);
    };
    switch (dtype) {
    case PKV_F16: bits = small(5, 10); break;
    case PKV_BF16: bits >>= 16; break;
    case PKV_F8_E4M3: bits = small(4, 3); break;
    case PKV_F8_E5M2: bits = small(5, 2); break;
    case PKV_F8_E8M0: bits = bits >> 23 & 255; break;
    default: break;
    }
    memcpy(p, &bits, size_of(dtype));
}

// ---- a batch and everything over it ----

struct Array {
    int32_t dtype = PKV_F32;
    std::vector<int64_t> shape;
    std::vector<unsigned char> host;
    std::unique_ptr<Memory> device;

    size_t elements() const {
        size_t n = 1;
        for (int64_t s : shape) n *= size_t(s);
        return n;
    }
    void *at(bool on_gpu) const { return on_gpu ? device->data() : const_cast<unsigned char *>(host.data()); }
    pkv_tensor tensor(bool on_gpu) const {
        pkv_tensor t = {};
        t.data = at(on_gpu);
        t.dtype = dtype;
        t.ndim = int32_t(shape.size());
        std::copy(shape.begin(), shape.end(), t.shape);
        return t;
    }
};

struct Shape {
    const char *name;
    int32_t dtype, cache, scale; // activations, the MLA and plain caches, their scales
    uint32_t granularity, page;
    uint32_t heads, latent, rope, nope, value; // MLA
    uint32_t kv_heads, head_size;              // the plain collection
    uint32_t index_heads, depth, top_k;
    int32_t mask, pairs;
    std::vector<std::pair<uint32_t, uint32_t>> sequences; // cached, new
};

enum Op { STORE, GATHER, ROPE, PREFILL, INDEXER, MERGE, OPS };
static const char *const NAMES[OPS] = {"pkv_kv_store",        "pkv_kv_gather",       "pkv_mla_rope_rmsnorm_quantize",
                                       "pkv_mla_prefill_fp8", "pkv_mla_indexer_fp8", "pkv_merge_attention"};

inline pkv_context *make_context(int32_t backend) {
    pkv_context_options o = {};
    o.struct_size = sizeof o;
    o.abi_version = PKV_ABI_VERSION;
    o.backend = backend;
    pkv_context *ctx = nullptr;
    pkv_error e = {};
    e.struct_size = sizeof e;
    if (pkv_context_create(&o, &ctx, &e) != PKV_OK) {
        printf("%s\n", e.message);
        exit(e.status == PKV_ERR_NO_DEVICE ? 77 : 1);
    }
    return ctx;
}
// By choose_kernels, or null.
inline pkv_context *&chosen_context() {
    static pkv_context *chosen = nullptr;
    return chosen;
}
// One of each for the whole process.
inline pkv_context *context(bool on_gpu) {
    static pkv_context *const both[2] = {make_context(PKV_BACKEND_CPU), make_context(PKV_BACKEND_CUDA)};
    return on_gpu && chosen_context() ? chosen_context() : both[on_gpu];
}
// Whether the kernels in *_sm90.cu run in their siblings' places.
inline bool hopper_chosen() {
    const char *siblings = getenv("PAGEDKV_CUDA_KERNELS");
    return siblings && strcmp(siblings, "hopper") == 0;
}
// From here on the GPU's context is one whose kernels are those that PAGEDKV_CUDA_KERNELS would name. No Scene may be
// alive.
inline void choose_kernels(const char *siblings) {
    setenv("PAGEDKV_CUDA_KERNELS", siblings, 1);
    pkv_context_destroy(chosen_context());
    chosen_context() = make_context(PKV_BACKEND_CUDA);
}

class Scene {
public:
    Shape s;
    uint32_t tokens = 0, keys = 0, blocks = 0, max_pages = 0, most_new = 0, most_cached = 0;
    Array row_offsets, lengths, table, buffer_offsets, cache_offsets;
    Array values, gathered, q_rope, q_rope_out, kv, freqs, gamma, q, weight, weight_scale, output, lse;
    Array index_q, index_s, indices, scores, output_a, output_b, lse_a, lse_b, merged, merged_lse;
    Array plain, plain_scales, mla, mla_scales, index, index_scales;

    // `rows` (at least the batch's tokens): rows of the ragged tensors, so that a later batch may have more. `only`:
    // one function's arrays, the others are a single element.
    explicit Scene(const Shape &shape, uint64_t seed = 1, uint32_t rows = 0, int only = OPS) : s(shape), random{seed} {
        set_sequences(shape.sequences);
        rows = std::max(rows, tokens);
        Op op = STORE; // whose arrays are being made
        // Long arrays repeat themselves, with a period that no row length divides.
        constexpr size_t PERIOD = 65521;
        auto make = [&](Array &a, int32_t dtype, std::vector<int64_t> shape_, auto next) {
            if (only != OPS && op != only) shape_ = {1};
            take(a, dtype, std::move(shape_));
            const size_t size = size_of(dtype), count = a.elements();
            for (size_t i = 0; i < std::min(count, PERIOD); i++) encode(&a.host[i * size], dtype, next());
            for (size_t i = PERIOD; i < count; i += PERIOD)
                memcpy(&a.host[i * size], a.host.data(), std::min(PERIOD, count - i) * size);
        };
        auto floats = [&](Array &a, int32_t dtype, std::vector<int64_t> shape_, float size) {
            make(a, dtype, std::move(shape_), [&] { return random.unit() * size; });
        };
        auto integers = [&](Array &a, int32_t dtype, std::vector<int64_t> shape_, int from, int to) {
            make(a, dtype, std::move(shape_), [&] { return float(from + int(random.below(uint32_t(to - from + 1)))); });
        };
        auto powers = [&](Array &a, std::vector<int64_t> shape_) {
            make(a, s.scale, std::move(shape_), [&] { return std::ldexp(1.0f, int(random.below(3)) - 2); });
        };
        const int64_t n = rows, h = s.heads, r = s.rope, width = s.nope + s.value, features = h * width,
                      row = s.latent + r;
        const int64_t groups = s.granularity ? (s.head_size + s.granularity - 1) / s.granularity : 1;
        const int64_t row_groups = s.granularity ? (row + s.granularity - 1) / s.granularity : 1;
        auto mine = [&](Op first, Op second) { op = only == second ? second : first; };
        mine(STORE, STORE);
        floats(values, s.dtype, {n, s.kv_heads, s.head_size}, 2);
        mine(GATHER, GATHER);
        floats(gathered, s.dtype, {keys, s.kv_heads, s.head_size}, 2);
        mine(STORE, GATHER); // two layers, each with keys and values
        floats(plain, s.cache, {blocks, 2, LAYERS, int64_t(s.page) * s.kv_heads * s.head_size}, 2);
        if (s.scale) powers(plain_scales, {blocks, 2, LAYERS, int64_t(s.page) * s.kv_heads * groups});
        mine(ROPE, ROPE);
        floats(q_rope, s.dtype, {n, h, r}, 2);
        floats(q_rope_out, s.dtype, {n, h, r}, 2);
        mine(ROPE, PREFILL);
        floats(kv, s.dtype, {n, row}, 1);
        floats(freqs, PKV_F32, {int64_t(most_new) + most_cached + 1, r}, 1);
        floats(gamma, s.dtype, {s.latent}, 1);
        floats(mla, s.cache, {blocks, LAYERS, s.page, row}, 1);
        if (s.scale) powers(mla_scales, {blocks, LAYERS, s.page, row_groups});
        mine(PREFILL, PREFILL);
        floats(q, s.dtype, {n, h, s.nope + r}, 1);
        floats(weight, PKV_F8_E4M3, {features, s.latent}, 8);
        floats(weight_scale, PKV_F32, {(features + 127) / 128, s.latent / 128}, 0.02f);
        floats(output, s.dtype, {n, h, s.value}, 1);
        floats(lse, PKV_F32, {n, h}, 1);
        mine(INDEXER, INDEXER); // small integers: sums are exact, ties common
        integers(index_q, PKV_F8_E4M3, {n, s.index_heads, s.depth}, -2, 2);
        integers(index_s, PKV_F32, {n, s.index_heads}, -2, 2);
        integers(indices, PKV_I32, {n, s.top_k}, 0, 7);
        floats(scores, PKV_F32, {n, s.top_k}, 1);
        integers(index, PKV_F8_E4M3, {blocks, LAYERS, s.page, s.depth}, -2, 2);
        integers(index_scales, PKV_F32, {blocks, LAYERS, s.page, 1}, 1, 2);
        mine(MERGE, MERGE);
        floats(output_a, s.dtype, {n, h, s.value}, 1);
        floats(output_b, s.dtype, {n, h, s.value}, 1);
        floats(merged, s.dtype, {n, h, s.value}, 1);
        floats(lse_a, PKV_F32, {n, h}, 3);
        floats(lse_b, PKV_F32, {n, h}, 3);
        floats(merged_lse, PKV_F32, {n, h}, 3);
        // Slots of nobody hold NaN.
        poison();
        buffer_rows = keys;
        for (Array *a : all()) {
            a->device = std::make_unique<Memory>(a->host.size());
            a->device->upload(a->host.data());
        }
        for (int side = 0; side < 2; side++) {
            if (plain.shape.size() > 1)
                collections[side][0] = collection(side != 0, false, s.kv_heads, s.head_size, s.cache, s.scale,
                                                  s.granularity, plain, plain_scales);
            if (mla.shape.size() > 1)
                collections[side][1] =
                    collection(side != 0, true, 1, uint32_t(row), s.cache, s.scale, s.granularity, mla, mla_scales);
            if (index.shape.size() > 1)
                collections[side][2] =
                    collection(side != 0, true, 1, s.depth, PKV_F8_E4M3, PKV_F32, 0, index, index_scales);
        }
    }
    ~Scene() {
        for (auto &side : collections)
            for (pkv_collection *c : side) pkv_collection_destroy(c);
    }
    Scene(const Scene &) = delete;

    std::vector<Array *> all() {
        std::vector<Array *> list = {
            &row_offsets,  &lengths,    &table,       &buffer_offsets, &cache_offsets, &values,     &gathered,
            &q_rope,       &q_rope_out, &kv,          &freqs,          &gamma,         &q,          &weight,
            &weight_scale, &output,     &lse,         &index_q,        &index_s,       &indices,    &scores,
            &output_a,     &output_b,   &merged,      &lse_a,          &lse_b,         &merged_lse, &plain,
            &mla,          &index,      &index_scales};
        if (s.scale) list.insert(list.end(), {&plain_scales, &mla_scales});
        return list;
    }
    void upload() {
        for (Array *a : all()) a->device->upload(a->host.data());
    }

    // Another batch in the same arrays: as many sequences, no more pages than there are.
    void set_batch(const std::vector<std::pair<uint32_t, uint32_t>> &sequences) {
        fill_batch(sequences);
        for (Array *a : {&row_offsets, &lengths, &buffer_offsets}) a->device->upload(a->host.data());
    }

    // The buffers hold `count` keys of each sequence from position `first` on. No more in all than there are.
    void set_ranges(const std::vector<std::pair<uint32_t, uint32_t>> &first_count) {
        keys = 0;
        for (size_t b = 0; b < first_count.size(); b++) {
            u32(cache_offsets)[b] = first_count[b].first;
            u32(buffer_offsets)[b + 1] = keys += first_count[b].second;
        }
        ranges = true;
        for (Array *a : {&cache_offsets, &buffer_offsets}) a->device->upload(a->host.data());
    }
    uint32_t length(size_t b) { return u32(lengths)[b] + u32(row_offsets)[b + 1] - u32(row_offsets)[b]; }
    static uint32_t *u32(Array &a) { return reinterpret_cast<uint32_t *>(a.host.data()); }

    // On the host alone: no sequence but the last, of which the last `rows` tokens are the new ones.
    void cut_host_batch(std::pair<uint32_t, uint32_t> last, uint32_t rows) {
        std::vector<std::pair<uint32_t, uint32_t>> sequences(lengths.elements(), {0, 0});
        sequences.back() = last;
        most_cached = std::max(most_cached, last.first);
        most_new = std::max(most_new, rows);
        fill_batch(sequences);
    }

    pkv_status query(Op op, bool on_gpu, size_t *bytes, pkv_error *e) {
        return with(op, on_gpu,
                    [&](const pkv_context *ctx, auto *params, auto size, auto) { return size(ctx, params, bytes, e); });
    }
    pkv_status run(Op op, bool on_gpu, pkv_stream stream, pkv_buffer workspace, pkv_error *e) {
        return with(op, on_gpu, [&](const pkv_context *ctx, auto *params, auto, auto go) {
            return go(ctx, stream, params, workspace, e);
        });
    }
    // For calls that are to be refused.
    std::function<void(Op, void *)> spoil;

    static constexpr uint32_t LAYERS = 2, LAYER = 1;

private:
    Random random;
    int64_t buffer_rows = 0;
    bool ranges = false; // buffers begin at cache_offsets
    std::vector<uint32_t> ids;
    pkv_collection *collections[2][3] = {};

    void take(Array &a, int32_t dtype, std::vector<int64_t> shape) {
        a.dtype = dtype;
        a.shape = std::move(shape);
        a.host.assign(a.elements() * size_of(dtype), 0);
    }
    void take_u32(Array &a, size_t n) { take(a, PKV_I32, {int64_t(n)}); }

    void set_sequences(const std::vector<std::pair<uint32_t, uint32_t>> &sequences) {
        uint32_t pages = 0;
        for (auto [cached, fresh] : sequences) {
            const uint32_t mine = (cached + fresh + s.page - 1) / s.page;
            pages += mine;
            max_pages = std::max(max_pages, mine);
            most_new = std::max(most_new, fresh);
            most_cached = std::max(most_cached, cached);
        }
        max_pages = std::max(max_pages, 1u);
        blocks = pages + 2;
        ids.resize(blocks);
        for (uint32_t i = 0; i < blocks; i++) ids[i] = i;
        for (uint32_t i = blocks; i-- > 1;) std::swap(ids[i], ids[random.below(i + 1)]);
        take_u32(row_offsets, sequences.size() + 1);
        take_u32(buffer_offsets, sequences.size() + 1);
        take_u32(cache_offsets, sequences.size());
        take_u32(lengths, sequences.size());
        take_u32(table, sequences.size() * max_pages);
        size_t next = 0;
        for (size_t b = 0; b < sequences.size(); b++) {
            const uint32_t mine = (sequences[b].first + sequences[b].second + s.page - 1) / s.page;
            for (uint32_t p = 0; p < max_pages; p++)
                u32(table)[b * max_pages + p] = p < mine ? ids[next++] : 0x7fffffffu;
        }
        fill_batch(sequences);
    }
    void fill_batch(const std::vector<std::pair<uint32_t, uint32_t>> &sequences) {
        tokens = keys = 0;
        for (size_t b = 0; b < sequences.size(); b++) {
            u32(lengths)[b] = sequences[b].first;
            u32(row_offsets)[b + 1] = tokens += sequences[b].second;
            u32(buffer_offsets)[b + 1] = keys += sequences[b].first + sequences[b].second;
        }
    }
    void poison() {
        std::vector<bool> used(size_t(blocks) * s.page);
        for (size_t b = 0; b < lengths.elements(); b++) {
            const uint32_t length = u32(buffer_offsets)[b + 1] - u32(buffer_offsets)[b];
            for (uint32_t p = 0; p < length; p++)
                used[size_t(u32(table)[b * max_pages + p / s.page]) * s.page + p % s.page] = true;
        }
        for (Array *a : {&plain, &mla, &index, &plain_scales, &mla_scales, &index_scales}) {
            if (a->shape.size() < 2) continue;
            const size_t row = a->host.size() /
                               (used.size() * size_t(a == &plain || a == &plain_scales ? 2 * LAYERS : LAYERS)),
                         outer = a->host.size() / (used.size() * row);
            for (size_t slot = 0; slot < used.size(); slot++)
                for (size_t o = 0; o < outer && !used[slot]; o++)
                    memset(&a->host[((slot / s.page * outer + o) * s.page + slot % s.page) * row], 0xff, row);
        }
    }
    pkv_collection *collection(bool on_gpu, bool is_mla, uint32_t heads, uint32_t width, int32_t dtype, int32_t scale,
                               uint32_t granularity, const Array &data, const Array &scales) {
        pkv_collection_options o = {};
        o.struct_size = sizeof o;
        o.dtype = dtype;
        o.scale_dtype = scale;
        o.num_blocks = blocks;
        o.num_layers = LAYERS;
        o.page_size = s.page;
        o.num_heads = heads;
        o.head_size = width;
        o.is_mla = is_mla;
        o.quantization_granularity = scale ? granularity : 0;
        o.blocks = {data.at(on_gpu), data.host.size()};
        if (scale) o.scales = {scales.at(on_gpu), scales.host.size()};
        pkv_collection *c = nullptr;
        pkv_error e = {};
        e.struct_size = sizeof e;
        if (pkv_collection_create(context(on_gpu), &o, &c, &e) != PKV_OK)
            die(std::string(e.argument) + ": " + e.message);
        return c;
    }

    template <class F> pkv_status with(Op op, bool g, F f) {
        pkv_batch b = {};
        b.struct_size = sizeof b;
        b.input_row_offsets = static_cast<uint32_t *>(row_offsets.at(g));
        b.cache_lengths = static_cast<uint32_t *>(lengths.at(g));
        b.lookup_table = static_cast<uint32_t *>(table.at(g));
        b.batch_size = uint32_t(lengths.elements());
        b.max_pages = max_pages;
        b.max_seq_length = most_new;
        b.max_cache_length = most_cached;
        auto with_params = [&](auto &p, auto size, auto go) {
            if (spoil) spoil(op, &p);
            return f(context(g), &p, size, go);
        };
        auto over = [&](auto p, pkv_collection *c) {
            p.struct_size = sizeof p;
            p.collection = c;
            p.batch = &b;
            p.layer_idx = LAYER;
            return p;
        };
        switch (op) {
        case STORE: {
            auto p = over(pkv_kv_store_params{}, collections[g][0]);
            p.kv_idx = 1;
            p.values = values.tensor(g);
            return with_params(p, pkv_kv_store_workspace_size, pkv_kv_store);
        }
        case GATHER: {
            auto p = over(pkv_kv_gather_params{}, collections[g][0]);
            p.buffer_row_offsets = static_cast<uint32_t *>(buffer_offsets.at(g));
            if (ranges) p.cache_offsets = static_cast<uint32_t *>(cache_offsets.at(g));
            p.out = gathered.tensor(g);
            return with_params(p, pkv_kv_gather_workspace_size, pkv_kv_gather);
        }
        case ROPE: {
            auto p = over(pkv_mla_rope_rmsnorm_quantize_params{}, collections[g][1]);
            p.rope = s.pairs;
            p.q_rope = q_rope.tensor(g);
            p.q_rope_output = q_rope_out.tensor(g);
            p.kv = kv.tensor(g);
            p.freqs_cis = freqs.tensor(g);
            p.gamma = gamma.tensor(g);
            p.epsilon = 1e-6f;
            return with_params(p, pkv_mla_rope_rmsnorm_quantize_workspace_size, pkv_mla_rope_rmsnorm_quantize);
        }
        case PREFILL: {
            auto p = over(pkv_mla_prefill_fp8_params{}, collections[g][1]);
            p.rope = s.pairs;
            p.mask = s.mask;
            p.window = 5;
            p.chunk = 7;
            p.scale = 1.0f / std::sqrt(float(s.nope + s.rope));
            p.epsilon = 1e-6f;
            p.buffer_length = g ? buffer_rows : int64_t(keys);
            p.buffer_row_offsets = static_cast<uint32_t *>(buffer_offsets.at(g));
            if (ranges) p.cache_offsets = static_cast<uint32_t *>(cache_offsets.at(g));
            p.q = q.tensor(g);
            p.kv = kv.tensor(g);
            p.freqs_cis = freqs.tensor(g);
            p.kv_norm_gamma = gamma.tensor(g);
            p.kv_b_proj = weight.tensor(g);
            p.kv_b_proj_scale = weight_scale.tensor(g);
            p.output = output.tensor(g);
            p.lse = lse.tensor(g);
            return with_params(p, pkv_mla_prefill_fp8_workspace_size, pkv_mla_prefill_fp8);
        }
        case INDEXER: {
            auto p = over(pkv_mla_indexer_fp8_params{}, collections[g][2]);
            p.mask = s.mask == PKV_MASK_NULL ? PKV_MASK_NULL : PKV_MASK_CAUSAL;
            p.top_k = s.top_k;
            p.q = index_q.tensor(g);
            p.q_s = index_s.tensor(g);
            p.output_indices = indices.tensor(g);
            p.output_scores = scores.tensor(g);
            return with_params(p, pkv_mla_indexer_fp8_workspace_size, pkv_mla_indexer_fp8);
        }
        default: {
            pkv_merge_attention_params p = {};
            p.struct_size = sizeof p;
            p.output_a = output_a.tensor(g);
            p.lse_a = lse_a.tensor(g);
            p.output_b = output_b.tensor(g);
            p.lse_b = lse_b.tensor(g);
            p.output = merged.tensor(g);
            p.lse = merged_lse.tensor(g);
            return with_params(p, pkv_merge_attention_workspace_size, pkv_merge_attention);
        }
        }
    }
};

} // namespace gpu
