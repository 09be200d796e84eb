// A reader of GGUF files, versions 2 and 3, that trusts nothing in the file: every read is bounds-checked, every
// product overflow-checked, and whatever is wrong becomes a gguf::Error that says what and where. Nothing is copied:
// metadata and tensors stay where they lie in the mapped file.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "encodings.hpp"

namespace gguf {

static_assert(sizeof(std::size_t) == 8, "sizes of a GGUF file are 64-bit");

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline std::uint64_t multiply(std::uint64_t a, std::uint64_t b, const std::string& what) {
    std::uint64_t product;
    if (__builtin_mul_overflow(a, b, &product)) throw Error(what + " overflows 64 bits");
    return product;
}

// Bytes not yet read; every take is checked against the end.
class Cursor {
public:
    Cursor(const std::uint8_t* data, std::size_t size) : begin_(data), at_(data), end_(data + size) {}

    const std::uint8_t* take(std::uint64_t bytes, const char* what) {
        if (bytes > static_cast<std::uint64_t>(end_ - at_))
            throw Error("the file ends inside " + std::string(what) + " (at byte " + std::to_string(position()) + ")");
        const std::uint8_t* start = at_;
        at_ += bytes;
        return start;
    }
    template <class T>
    T number(const char* what) {
        T value;
        std::memcpy(&value, take(sizeof value, what), sizeof value);
        return value;
    }
    std::string_view string(const char* what) {
        auto length = number<std::uint64_t>(what);
        return {reinterpret_cast<const char*>(take(length, what)), length};
    }
    std::size_t position() const { return static_cast<std::size_t>(at_ - begin_); }

private:
    const std::uint8_t *begin_, *at_, *end_;
};

enum class Type : std::uint32_t { U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64 };

struct Array {
    Type type;
    std::uint64_t count;
    const std::uint8_t* data;  // elements as they lie in the file, already walked once and so known to be whole
    std::size_t size;
};
using Value = std::variant<std::uint64_t, std::int64_t, double, bool, std::string_view, Array>;

struct Tensor {
    std::string name;
    std::uint32_t encoding = 0;
    std::vector<std::uint64_t> shape;  // GGUF's order: the row length first
    std::uint64_t offset = 0;          // from the start of the data section
};

// Rows of a quantised matrix inside the file.
struct Matrix {
    std::string name;
    const Encoding* encoding = nullptr;
    const std::uint8_t* data = nullptr;
    std::size_t rows = 0, cols = 0, row_bytes = 0;

    std::size_t bytes() const { return rows * row_bytes; }  // checked in File::matrix
    Matrix slice(std::size_t first, std::size_t count) const {
        Matrix part = *this;
        part.data += first * row_bytes;
        part.rows = count;
        return part;
    }
};

// Read-only memory: a mapped file, or bytes made in the program.
class Bytes {
public:
    static Bytes map(const std::string& path) {
        int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) throw Error(std::string("cannot open it: ") + std::strerror(errno));
        struct stat info{};
        std::string problem;
        Bytes bytes;
        if (::fstat(fd, &info) != 0) {
            problem = std::strerror(errno);
        } else if (!S_ISREG(info.st_mode)) {
            problem = "not a regular file";
        } else if (info.st_size > 0) {
            void* address = ::mmap(nullptr, static_cast<std::size_t>(info.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
            if (address == MAP_FAILED) {
                problem = std::string("cannot map it: ") + std::strerror(errno);
            } else {
                bytes.mapped_ = bytes.data_ = static_cast<const std::uint8_t*>(address);
                bytes.size_ = static_cast<std::size_t>(info.st_size);
            }
        }
        ::close(fd);  // the mapping stays
        if (!problem.empty()) throw Error(problem);
        return bytes;
    }
    static Bytes own(std::vector<std::uint8_t> content) {
        Bytes bytes;
        bytes.owned_ = std::move(content);
        bytes.data_ = bytes.owned_.data();
        bytes.size_ = bytes.owned_.size();
        return bytes;
    }
    Bytes(Bytes&& other) noexcept
        : owned_(std::move(other.owned_)), data_(other.data_), mapped_(other.mapped_), size_(other.size_) {
        other.mapped_ = nullptr;
    }
    Bytes& operator=(Bytes&&) = delete;
    ~Bytes() {
        if (mapped_) ::munmap(const_cast<std::uint8_t*>(mapped_), size_);
    }
    const std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    Bytes() = default;
    std::vector<std::uint8_t> owned_;
    const std::uint8_t *data_ = nullptr, *mapped_ = nullptr;
    std::size_t size_ = 0;
};

class File {
public:
    explicit File(Bytes bytes) : bytes_(std::move(bytes)) {
        Cursor cursor(bytes_.data(), bytes_.size());
        if (std::memcmp(cursor.take(4, "the magic number"), "GGUF", 4) != 0) throw Error("not a GGUF file");
        version_ = cursor.number<std::uint32_t>("the version");
        if (version_ == 0x02000000 || version_ == 0x03000000) throw Error("a big-endian GGUF file, which is not read");
        if (version_ != 2 && version_ != 3)
            throw Error("GGUF version " + std::to_string(version_) + "; versions 2 and 3 are read");
        auto tensor_count = cursor.number<std::uint64_t>("the number of tensors");
        auto metadata_count = cursor.number<std::uint64_t>("the number of metadata entries");

        // Counts are not believed either: nothing is reserved, and the loops end where the file ends.
        for (std::uint64_t i = 0; i < metadata_count; i++) {
            std::string key(cursor.string("a metadata key"));
            auto type = read_type(cursor);
            if (!metadata_.emplace(key, read_value(cursor, type, 0)).second)
                throw Error("metadata key " + quoted(key) + " appears twice");
        }
        for (std::uint64_t i = 0; i < tensor_count; i++) {
            Tensor tensor;
            tensor.name = cursor.string("a tensor name");
            auto dimensions = cursor.number<std::uint32_t>("a tensor's number of dimensions");
            if (dimensions < 1 || dimensions > 4)
                throw Error("tensor " + quoted(tensor.name) + " has " + std::to_string(dimensions) + " dimensions");
            for (std::uint32_t d = 0; d < dimensions; d++)
                tensor.shape.push_back(cursor.number<std::uint64_t>("a tensor's shape"));
            tensor.encoding = cursor.number<std::uint32_t>("a tensor's type");
            tensor.offset = cursor.number<std::uint64_t>("a tensor's offset");
            std::string name = tensor.name;
            if (!tensors_.emplace(name, std::move(tensor)).second)
                throw Error("tensor " + quoted(name) + " appears twice");
        }
        auto alignment = unsigned_or("general.alignment", 32);
        if (alignment == 0 || alignment > (1u << 30) || (alignment & (alignment - 1)))
            throw Error("general.alignment is " + std::to_string(alignment) + ", not a power of two");
        auto padding = (alignment - cursor.position() % alignment) % alignment;
        if (!tensors_.empty()) cursor.take(padding, "the padding before the tensors");
        data_start_ = cursor.position();
    }

    std::uint32_t version() const { return version_; }
    std::size_t size() const { return bytes_.size(); }
    std::size_t tensor_count() const { return tensors_.size(); }
    const Value* find(const std::string& key) const {
        auto found = metadata_.find(key);
        return found == metadata_.end() ? nullptr : &found->second;
    }

    std::string string(const std::string& key) const {
        const Value* value = find(key);
        if (!value) throw Error("metadata key " + quoted(key) + " is missing");
        if (auto* text = std::get_if<std::string_view>(value)) return std::string(*text);
        throw Error("metadata key " + quoted(key) + " is not a string");
    }
    // A number, or element `index` where the file gives one for each layer.
    std::optional<std::uint64_t> find_unsigned(const std::string& key, std::uint64_t index = 0) const {
        const Value* value = find(key);
        if (!value) return std::nullopt;
        if (auto* number = std::get_if<std::uint64_t>(value)) return *number;
        if (auto* number = std::get_if<std::int64_t>(value); number && *number >= 0) return *number;
        if (auto* array = std::get_if<Array>(value)) {
            if (index >= array->count) throw Error("metadata key " + quoted(key) + " has too few elements");
            std::uint32_t element;
            if (array->type == Type::U32 || array->type == Type::I32) {
                std::memcpy(&element, array->data + 4 * index, 4);
                if (array->type == Type::U32 || element <= INT32_MAX) return element;
            }
        }
        throw Error("metadata key " + quoted(key) + " is not a count");
    }
    std::uint64_t unsigned_or(const std::string& key, std::uint64_t fallback) const {
        return find_unsigned(key).value_or(fallback);
    }
    std::uint64_t need_unsigned(const std::string& key, std::uint64_t index = 0) const {
        auto value = find_unsigned(key, index);
        if (!value) throw Error("metadata key " + quoted(key) + " is missing");
        return *value;
    }
    std::optional<double> find_real(const std::string& key) const {
        const Value* value = find(key);
        if (!value) return std::nullopt;
        if (auto* number = std::get_if<double>(value)) return *number;
        throw Error("metadata key " + quoted(key) + " is not a real number");
    }

    bool has(const std::string& name) const { return tensors_.count(name) != 0; }

    // A matrix in an encoding that the example can decode, wholly inside the file.
    Matrix matrix(const std::string& name) const {
        auto found = tensors_.find(name);
        if (found == tensors_.end()) throw Error("tensor " + quoted(name) + " is missing");
        const Tensor& tensor = found->second;
        Matrix matrix;
        matrix.name = name;
        matrix.encoding = find_encoding(tensor.encoding);
        if (!matrix.encoding)
            throw Error("tensor " + quoted(name) + " is encoded as " + encoding_name(tensor.encoding) +
                        ", which is not supported; supported are " + supported_encodings());
        matrix.cols = tensor.shape[0];
        std::uint64_t rows = 1;
        for (std::size_t d = 1; d < tensor.shape.size(); d++)
            rows = multiply(rows, tensor.shape[d], "the size of " + quoted(name));
        matrix.rows = rows;
        if (matrix.rows == 0 || matrix.cols == 0) throw Error("tensor " + quoted(name) + " is empty");
        if (matrix.cols % matrix.encoding->block_elements)
            throw Error("tensor " + quoted(name) + ": rows of " + std::to_string(matrix.cols) +
                        " elements are not whole " + matrix.encoding->name + " blocks of " +
                        std::to_string(matrix.encoding->block_elements));
        matrix.row_bytes = multiply(matrix.cols / matrix.encoding->block_elements, matrix.encoding->block_bytes,
                                    "the row size of " + quoted(name));
        auto bytes = multiply(matrix.rows, matrix.row_bytes, "the size of " + quoted(name));
        auto room = bytes_.size() - data_start_;
        if (tensor.offset > room || bytes > room - tensor.offset)
            throw Error("tensor " + quoted(name) + " reaches past the end of the file: it needs " +
                        std::to_string(bytes) + " bytes at offset " + std::to_string(tensor.offset) + " of " +
                        std::to_string(room) + " (is the file cut off?)");
        matrix.data = bytes_.data() + data_start_ + tensor.offset;
        return matrix;
    }

    // A one-dimensional F32 tensor of a known length (norm weights, biases), copied because the file need not align it.
    std::vector<float> vector(const std::string& name, std::size_t length) const {
        Matrix source = matrix(name);
        if (source.encoding->id != 0) throw Error("tensor " + quoted(name) + " is not F32");
        if (source.rows != 1 || source.cols != length)
            throw Error("tensor " + quoted(name) + " has " + std::to_string(source.cols) + " elements, expected " +
                        std::to_string(length));
        std::vector<float> values(length);
        std::memcpy(values.data(), source.data, length * sizeof(float));
        return values;
    }

    // Names come from the file: no control characters to the terminal.
    static std::string quoted(const std::string& text) {
        std::string out = "'";
        for (char c : text.substr(0, 64)) out += c >= ' ' && c <= '~' ? c : '?';
        return out + (text.size() > 64 ? "...'" : "'");
    }

private:
    static Type read_type(Cursor& cursor) {
        auto type = cursor.number<std::uint32_t>("a metadata type");
        if (type > static_cast<std::uint32_t>(Type::F64))
            throw Error("metadata type " + std::to_string(type) + " does not exist");
        return static_cast<Type>(type);
    }
    static std::uint64_t size_of(Type type) {  // 0: not of one size
        switch (type) {
            case Type::U8: case Type::I8: case Type::Bool: return 1;
            case Type::U16: case Type::I16: return 2;
            case Type::U32: case Type::I32: case Type::F32: return 4;
            case Type::U64: case Type::I64: case Type::F64: return 8;
            case Type::String: case Type::Array: return 0;
        }
        return 0;
    }
    static Value read_value(Cursor& cursor, Type type, int depth) {
        constexpr const char* what = "a metadata value";
        switch (type) {
            case Type::U8: return std::uint64_t{cursor.number<std::uint8_t>(what)};
            case Type::U16: return std::uint64_t{cursor.number<std::uint16_t>(what)};
            case Type::U32: return std::uint64_t{cursor.number<std::uint32_t>(what)};
            case Type::U64: return cursor.number<std::uint64_t>(what);
            case Type::I8: return std::int64_t{cursor.number<std::int8_t>(what)};
            case Type::I16: return std::int64_t{cursor.number<std::int16_t>(what)};
            case Type::I32: return std::int64_t{cursor.number<std::int32_t>(what)};
            case Type::I64: return cursor.number<std::int64_t>(what);
            case Type::F32: return double{cursor.number<float>(what)};
            case Type::F64: return cursor.number<double>(what);
            case Type::Bool: return cursor.number<std::uint8_t>(what) != 0;
            case Type::String: return cursor.string(what);
            case Type::Array: return read_array(cursor, depth);
        }
        throw Error("metadata of unknown type");
    }
    static Array read_array(Cursor& cursor, int depth) {
        if (depth > 4) throw Error("metadata arrays are nested too deeply");
        Array array{};
        array.type = read_type(cursor);
        array.count = cursor.number<std::uint64_t>("an array's length");
        auto start = cursor.position();
        array.data = cursor.take(0, "an array");
        if (auto element = size_of(array.type)) {
            cursor.take(multiply(array.count, element, "an array's size"), "an array");
        } else {
            for (std::uint64_t i = 0; i < array.count; i++) read_value(cursor, array.type, depth + 1);
        }
        array.size = cursor.position() - start;
        return array;
    }

    Bytes bytes_;
    std::uint32_t version_ = 0;
    std::size_t data_start_ = 0;
    std::unordered_map<std::string, Value> metadata_;
    std::unordered_map<std::string, Tensor> tensors_;
};

}  // namespace gguf
