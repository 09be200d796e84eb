// MAX as a peer: its own function of the same name, compiled from peer_max.mojo to the library that is opened here. It packs its weights, takes the triple
// 4096 + 1024 + 1024 rows of 4096 columns, and runs on all cores.
#include "peer.h"

#include <dlfcn.h>

#include <algorithm>
#include <new>
#include <thread>
#include <vector>

namespace {

constexpr std::int64_t columns = 4096, page = 128, kv_rows = 1024;
constexpr std::int64_t shape[3] = {4096, kv_rows, kv_rows};

// peer_max.mojo; addresses are integers there.
std::intptr_t (*max_pack)(std::intptr_t type, std::intptr_t rows, std::intptr_t width, const void* raw, void* packed);
std::intptr_t (*max_run)(std::intptr_t context, std::intptr_t type, std::intptr_t m, const float* x, const void* q, const void* k, const void* v,
                         float* output, float* blocks, const std::uint32_t* table);
std::intptr_t context;

// MAX's kernels read whole vectors.
struct Bytes {
    explicit Bytes(std::size_t size) : data(static_cast<std::uint8_t*>(::operator new(size, std::align_val_t{64}))) {}
    Bytes(Bytes&& other) noexcept : data(other.data) { other.data = nullptr; }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    ~Bytes() { ::operator delete(data, std::align_val_t{64}); }
    std::uint8_t* data;
};

std::size_t row_bytes(int type) {
    switch (type) {
        case 2: return columns / 32 * 18;     // Q4_0
        case 12: return columns / 256 * 144;  // Q4_K
        case 14: return columns / 256 * 210;  // Q6_K
        default: return 0;
    }
}

struct Matmul {
    int type;
    unsigned copies;
    std::vector<Bytes> weights{};  // Q, K and V of each copy
    std::int64_t m = 0;
    std::vector<float> x{}, q{}, blocks{};  // blocks: [page][key, value][slot][row]
    std::vector<std::uint32_t> table{};
};

}  // namespace

const char* peer_open(const char* library, const char*, unsigned threads) {
    if (threads != std::thread::hardware_concurrency()) return nullptr;
    void* kernels = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!kernels) return nullptr;
    max_pack = reinterpret_cast<decltype(max_pack)>(dlsym(kernels, "max_pack"));
    max_run = reinterpret_cast<decltype(max_run)>(dlsym(kernels, "max_run"));
    auto* open = reinterpret_cast<std::intptr_t (*)()>(dlsym(kernels, "max_open"));
    if (!max_pack || !max_run || !open || !(context = open())) return nullptr;
    return "MAX, unfused_qkv_matmul_ragged_paged_gguf_quantized";
}

void* peer_prepare(int type, unsigned count, const std::int64_t* rows, const void* const* data, std::int64_t cols, unsigned copies, int repack) {
    std::size_t width = row_bytes(type);
    if (!repack || !width || count != 3 || cols != columns || !std::equal(shape, shape + 3, rows)) return nullptr;
    auto* s = new Matmul{type, copies};
    for (unsigned copy = 0; copy < copies; copy++)
        for (int i = 0; i < 3; i++) {
            s->weights.emplace_back(static_cast<std::size_t>(rows[i]) * width);
            if (max_pack(type, rows[i], static_cast<std::intptr_t>(width), data[i], s->weights.back().data)) {
                delete s;
                return nullptr;
            }
        }
    return s;
}

void peer_set_rows(void* handle, std::int64_t m, const float* activations) {
    auto* s = static_cast<Matmul*>(handle);
    std::int64_t pages = (m + page - 1) / page;
    s->m = m;
    s->x.assign(activations, activations + m * columns);
    s->q.assign(static_cast<std::size_t>(m * shape[0]), 0);
    s->blocks.assign(static_cast<std::size_t>(pages * 2 * page * kv_rows), 0);
    s->table.resize(static_cast<std::size_t>(pages));
    for (std::size_t i = 0; i < s->table.size(); i++) s->table[i] = static_cast<std::uint32_t>(i);
}

int peer_run(void* handle, int every_copy) {
    auto* s = static_cast<Matmul*>(handle);
    for (unsigned copy = 0; copy < (every_copy ? s->copies : 1); copy++) {
        const Bytes* w = &s->weights[3 * copy];
        if (max_run(context, s->type, s->m, s->x.data(), w[0].data, w[1].data, w[2].data, s->q.data(), s->blocks.data(), s->table.data())) return 1;
    }
    return 0;
}

void peer_result(void* handle, unsigned i, float* out) {
    auto* s = static_cast<Matmul*>(handle);
    if (i == 0) std::copy(s->q.begin(), s->q.end(), out);
    else
        for (std::int64_t t = 0; t < s->m; t++)
            std::copy_n(s->blocks.data() + ((t / page * 2 + i - 1) * page + t % page) * kv_rows, kv_rows, out + t * kv_rows);
}

void peer_free(void* handle) { delete static_cast<Matmul*>(handle); }
