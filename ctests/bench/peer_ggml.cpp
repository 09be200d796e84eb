// ggml as a peer: ggml_mul_mat through its public C API, on the plain and on the run-time repacked path. The declarations are those of the API (ggml.h,
// ggml-backend.h) that are used here; everything is opened at run time, so no header or library of ggml is needed to build.
//   -DPEER_IK: ik_llama.cpp's libggml.so, which repacks by iqk_repack_tensor.  Without: mainline's libggml.so with its CPU backends in a directory.
#include "peer.h"

#include <dlfcn.h>

#include <string>
#include <vector>

extern "C" {
struct ggml_context;
struct ggml_tensor;
struct ggml_cgraph;
struct ggml_init_params {
    size_t mem_size;
    void* mem_buffer;
    bool no_alloc;
};
}

namespace {

void *library, *base;

template <class F>
F* find(const char* name) {
    void* symbol = dlsym(library, name);
    if (!symbol && base) symbol = dlsym(base, name);
    return reinterpret_cast<F*>(symbol);
}

void *backend, *buffer_type;
std::vector<void*> repack_types;  // mainline: buffer types that repack what is put into them
std::string description;

auto* init() { return find<ggml_context*(ggml_init_params)>("ggml_init"); }
constexpr int type_f32 = 0;

struct Matmul {
    int type;
    int64_t cols, m = 0;
    std::vector<int64_t> rows;
    unsigned copies;
    ggml_context *weights = nullptr, *graph_context = nullptr;
    void *weight_buffer = nullptr, *graph_buffer = nullptr;
    std::vector<ggml_tensor*> w{}, y{};
    ggml_cgraph *first = nullptr, *all = nullptr;  // copy 0, every copy
};

void release(ggml_context*& context, void*& buffer) {
    if (buffer) find<void(void*)>("ggml_backend_buffer_free")(buffer);
    if (context) find<void(ggml_context*)>("ggml_free")(context);
    buffer = nullptr, context = nullptr;
}

}  // namespace

const char* peer_open(const char* path, const char* directory, unsigned threads) {
    std::string dir = directory;
#ifndef PEER_IK
    base = dlopen((dir + "/libggml-base.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!base) return nullptr;
#endif
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return nullptr;
#ifdef PEER_IK
    backend = find<void*()>("ggml_backend_cpu_init")();
    if (!backend) return nullptr;
    find<void(void*, int)>("ggml_backend_cpu_set_n_threads")(backend, static_cast<int>(threads));
    buffer_type = find<void*()>("ggml_backend_cpu_buffer_type")();
    description = "ik_llama.cpp ggml";
#else
    find<void(const char*)>("ggml_backend_load_all_from_path")(directory);
    void* device = find<void*(int)>("ggml_backend_dev_by_type")(0);
    if (!device) return nullptr;
    void* registry = find<void*(void*)>("ggml_backend_dev_backend_reg")(device);
    auto* address = find<void*(void*, const char*)>("ggml_backend_reg_get_proc_address");
    backend = find<void*(void*, const char*)>("ggml_backend_dev_init")(device, nullptr);
    reinterpret_cast<void (*)(void*, int)>(address(registry, "ggml_backend_set_n_threads"))(backend, static_cast<int>(threads));
    // Without a thread pool of its own each graph would start and join its threads.
    alignas(16) char parameters[4096] = {};
    if (auto* initialise = find<void(void*, int)>("ggml_threadpool_params_init")) {
        initialise(parameters, static_cast<int>(threads));
        void* pool = reinterpret_cast<void* (*)(void*)>(address(registry, "ggml_threadpool_new"))(parameters);
        reinterpret_cast<void (*)(void*, void*)>(address(registry, "ggml_backend_cpu_set_threadpool"))(backend, pool);
    }
    buffer_type = find<void*(void*)>("ggml_backend_dev_buffer_type")(device);
    if (auto* extra = reinterpret_cast<void** (*)(void*)>(address(registry, "ggml_backend_dev_get_extra_bufts")))
        for (void** type = extra(device); type && *type; type++) repack_types.push_back(*type);
    auto* version = find<const char*()>("ggml_version");
    description = std::string("llama.cpp ggml ") + (version ? version() : "");
#endif
    return description.c_str();
}

void* peer_prepare(int type, unsigned count, const int64_t* rows, const void* const* data, int64_t cols, unsigned copies, int repack) {
    auto* matmul = new Matmul{type, cols, 0, std::vector<int64_t>(rows, rows + count), copies};
    size_t overhead = find<size_t()>("ggml_tensor_overhead")();
    matmul->weights = init()({overhead * (count * copies + 8), nullptr, true});
    for (unsigned c = 0; c < copies; c++)
        for (unsigned i = 0; i < count; i++)
            matmul->w.push_back(find<ggml_tensor*(ggml_context*, int, int64_t, int64_t)>("ggml_new_tensor_2d")(matmul->weights, type, cols, rows[i]));
    void* place = buffer_type;
#ifndef PEER_IK
    if (repack) {
        // As llama.cpp chooses: the first repacking buffer type that takes all matrices; whether it does shows once a tensor lies in it.
        place = nullptr;
        auto* supports = find<bool(void*, const ggml_tensor*)>("ggml_backend_dev_supports_op");
        void* device = find<void*(int)>("ggml_backend_dev_by_type")(0);
        for (void* candidate : repack_types) {
            bool all = true;
            for (unsigned i = 0; i < count; i++) {
                ggml_context* probe = init()({overhead * 8, nullptr, true});
                auto* new_2d = find<ggml_tensor*(ggml_context*, int, int64_t, int64_t)>("ggml_new_tensor_2d");
                ggml_tensor* w = new_2d(probe, type, cols, rows[i]);
                void* buffer = find<void*(ggml_context*, void*)>("ggml_backend_alloc_ctx_tensors_from_buft")(probe, candidate);
                ggml_context* rest = init()({overhead * 8, nullptr, true});
                ggml_tensor* x = new_2d(rest, type_f32, cols, 32);
                all = all && buffer && supports(device, find<ggml_tensor*(ggml_context*, ggml_tensor*, ggml_tensor*)>("ggml_mul_mat")(rest, w, x));
                void* none = nullptr;
                release(rest, none);
                release(probe, buffer);
            }
            if (all && !place) place = candidate;
        }
        if (!place) return peer_free(matmul), nullptr;
    }
#endif
    matmul->weight_buffer = find<void*(ggml_context*, void*)>("ggml_backend_alloc_ctx_tensors_from_buft")(matmul->weights, place);
    if (!matmul->weight_buffer) return peer_free(matmul), nullptr;
    for (unsigned c = 0, j = 0; c < copies; c++)
        for (unsigned i = 0; i < count; i++, j++)
            find<void(ggml_tensor*, const void*, size_t, size_t)>("ggml_backend_tensor_set")(
                matmul->w[j], data[i], 0, find<size_t(int, int64_t)>("ggml_row_size")(type, cols) * static_cast<size_t>(rows[i]));
#ifdef PEER_IK
    if (repack)
        for (ggml_tensor* w : matmul->w) {
            find<void(ggml_tensor*)>("iqk_repack_tensor")(w);
            if (*reinterpret_cast<const int*>(w) == type) return peer_free(matmul), nullptr;  // no repacked kernel for this type
        }
#endif
    return matmul;
}

void peer_set_rows(void* handle, int64_t m, const float* activations) {
    auto* matmul = static_cast<Matmul*>(handle);
    release(matmul->graph_context, matmul->graph_buffer);
    matmul->y.clear();
    matmul->m = m;
    const size_t nodes = matmul->w.size() + 16, size = 2 * nodes;  // a graph counts its inputs as well
    size_t overhead = find<size_t()>("ggml_tensor_overhead")() * (nodes + matmul->copies) + 2 * find<size_t(size_t, bool)>("ggml_graph_overhead_custom")(size, false);
    ggml_context* context = matmul->graph_context = init()({overhead, nullptr, true});
    auto* expand = find<void(ggml_cgraph*, ggml_tensor*)>("ggml_build_forward_expand");
    matmul->first = find<ggml_cgraph*(ggml_context*, size_t, bool)>("ggml_new_graph_custom")(context, size, false);
    matmul->all = find<ggml_cgraph*(ggml_context*, size_t, bool)>("ggml_new_graph_custom")(context, size, false);
    std::vector<ggml_tensor*> inputs;
    for (unsigned c = 0, j = 0; c < matmul->copies; c++) {
        inputs.push_back(find<ggml_tensor*(ggml_context*, int, int64_t, int64_t)>("ggml_new_tensor_2d")(context, type_f32, matmul->cols, m));
        for (size_t i = 0; i < matmul->rows.size(); i++, j++) {
            matmul->y.push_back(find<ggml_tensor*(ggml_context*, ggml_tensor*, ggml_tensor*)>("ggml_mul_mat")(context, matmul->w[j], inputs.back()));
            if (c == 0) expand(matmul->first, matmul->y.back());
            expand(matmul->all, matmul->y.back());
        }
    }
    matmul->graph_buffer = find<void*(ggml_context*, void*)>("ggml_backend_alloc_ctx_tensors_from_buft")(matmul->graph_context, buffer_type);
    for (ggml_tensor* x : inputs)
        find<void(ggml_tensor*, const void*, size_t, size_t)>("ggml_backend_tensor_set")(x, activations, 0, static_cast<size_t>(m * matmul->cols) * 4);
}

int peer_run(void* handle, int every_copy) {
    auto* matmul = static_cast<Matmul*>(handle);
    return find<int(void*, ggml_cgraph*)>("ggml_backend_graph_compute")(backend, every_copy ? matmul->all : matmul->first);
}

void peer_result(void* handle, unsigned i, float* out) {
    auto* matmul = static_cast<Matmul*>(handle);
    find<void(const ggml_tensor*, void*, size_t, size_t)>("ggml_backend_tensor_get")(matmul->y[i], out, 0, static_cast<size_t>(matmul->m * matmul->rows[i]) * 4);
}

void peer_free(void* handle) {
    auto* matmul = static_cast<Matmul*>(handle);
    release(matmul->graph_context, matmul->graph_buffer);
    release(matmul->weights, matmul->weight_buffer);
    delete matmul;
}
