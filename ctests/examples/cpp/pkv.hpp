// The few lines of C++ that make the C API comfortable: owning handles, zeroed structs, errors as exceptions.
// Copy this file into an engine; nothing in it is specific to the examples.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "pagedkv.h"

namespace pkv {

// Every struct of the API starts zeroed (zero is the default of each field) and says how large the caller thinks it is.
template <class T>
T make() {
    T value{};
    value.struct_size = sizeof value;
    return value;
}

struct Error : std::runtime_error {
    Error(const char* function, const pkv_error& error)
        : std::runtime_error(std::string(function) + ": " + pkv_status_name(error.status) +
                             (error.argument[0] ? std::string(" in ") + error.argument : "") + ": " + error.message),
          status(error.status) {}
    pkv_status status;
};

// Calls a function of the API with a pkv_error as its last argument and throws what it reports.
template <class Function, class... Arguments>
void call(const char* name, Function function, Arguments... arguments) {
    auto error = make<pkv_error>();
    if (function(arguments..., &error) != PKV_OK) throw Error(name, error);
}
#define PKV_CALL(function, ...) ::pkv::call(#function, function, __VA_ARGS__)

struct Destroy {
    void operator()(pkv_context* handle) const noexcept { pkv_context_destroy(handle); }
    void operator()(pkv_collection* handle) const noexcept { pkv_collection_destroy(handle); }
    void operator()(pkv_gguf_weight* handle) const noexcept { pkv_gguf_weight_destroy(handle); }
};
using Context = std::unique_ptr<pkv_context, Destroy>;  // declare it first: a context outlives what was made with it
using Collection = std::unique_ptr<pkv_collection, Destroy>;
using Weight = std::unique_ptr<pkv_gguf_weight, Destroy>;

inline Context create_context(std::uint32_t num_threads = 0) {
    auto options = make<pkv_context_options>();
    options.abi_version = PKV_ABI_VERSION;
    options.backend = PKV_BACKEND_CPU;
    options.num_threads = num_threads;
    pkv_context* handle = nullptr;
    PKV_CALL(pkv_context_create, &options, &handle);
    return Context(handle);
}

inline Collection create_collection(const pkv_context* context, const pkv_collection_options& options) {
    pkv_collection* handle = nullptr;
    PKV_CALL(pkv_collection_create, context, &options, &handle);
    return Collection(handle);
}

inline Weight create_weight(const pkv_context* context, const pkv_gguf_weight_options& options) {
    pkv_gguf_weight* handle = nullptr;
    PKV_CALL(pkv_gguf_weight_create, context, &options, &handle);
    return Weight(handle);
}

// A contiguous row-major view. Inputs lose their const here: one struct serves inputs and outputs.
inline pkv_tensor tensor(const void* data, std::int32_t dtype, std::initializer_list<std::size_t> shape) {
    pkv_tensor view{};
    view.data = const_cast<void*>(data);
    view.dtype = dtype;
    for (std::size_t extent : shape) view.shape[view.ndim++] = static_cast<std::int64_t>(extent);
    return view;
}

template <class T>
constexpr std::int32_t dtype_of() {
    if (std::is_same<T, float>::value) return PKV_F32;
    if (std::is_same<T, std::int32_t>::value) return PKV_I32;
    static_assert(std::is_same<T, float>::value || std::is_same<T, std::int32_t>::value, "give the dtype by hand");
}

template <class T>
pkv_tensor tensor(const std::vector<T>& data, std::initializer_list<std::size_t> shape) {
    return tensor(data.data(), dtype_of<T>(), shape);
}

// Scratch memory of an engine: allocated once for the largest step, handed to every call.
class Workspace {
public:
    void reserve(std::size_t bytes) {
        if (bytes <= size_) return;
        data_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{alignment})));
        size_ = bytes;
    }
    pkv_buffer buffer() const { return {data_.get(), size_}; }

private:
    static constexpr std::size_t alignment = 256;
    struct Free {
        void operator()(std::byte* data) const noexcept { ::operator delete(data, std::align_val_t{alignment}); }
    };
    std::unique_ptr<std::byte, Free> data_;
    std::size_t size_ = 0;
};

constexpr pkv_stream no_stream{};  // a CPU context has no streams

// The sequences of one step and where their pages lie: the arrays that pkv_batch borrows, and their owner.
struct Batch {
    std::vector<std::uint32_t> row_offsets{0};  // [batch_size + 1]
    std::vector<std::uint32_t> cache_lengths;   // [batch_size]
    std::vector<std::uint32_t> lookup_table;    // [batch_size, max_pages]
    std::uint32_t max_pages = 0;
    std::uint32_t max_new = 0, max_cached = 0;

    explicit Batch(std::uint32_t table_columns) : max_pages(table_columns) {}

    void add(std::uint32_t new_tokens, std::uint32_t cached, const std::vector<std::uint32_t>& pages) {
        row_offsets.push_back(row_offsets.back() + new_tokens);
        cache_lengths.push_back(cached);
        lookup_table.insert(lookup_table.end(), pages.begin(), pages.end());
        lookup_table.resize(cache_lengths.size() * max_pages, UINT32_MAX);  // past a sequence's pages: never read
        if (new_tokens > max_new) max_new = new_tokens;
        if (cached > max_cached) max_cached = cached;
    }

    std::uint32_t num_tokens() const { return row_offsets.back(); }

    pkv_batch view() const {
        auto batch = make<pkv_batch>();
        batch.input_row_offsets = row_offsets.data();
        batch.cache_lengths = cache_lengths.data();
        batch.lookup_table = lookup_table.data();
        batch.batch_size = static_cast<std::uint32_t>(cache_lengths.size());
        batch.max_pages = max_pages;
        batch.max_seq_length = max_new;
        batch.max_cache_length = max_cached;
        return batch;
    }
};

}  // namespace pkv
