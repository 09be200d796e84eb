// The attention projections of a real GGUF model, computed by pagedkv into a paged KV collection, and checked.
//
//   python3 ctests/run.py demo [OPTIONS] [MODEL.gguf]      builds everything and, without a model, fetches Gemma 3 270M
//
// or by hand:
//
//   cargo build --release
//   c++ -std=c++17 -O2 -I include ctests/examples/cpp/gguf_qkv.cpp target/release/libpagedkv.a -ldl -o gguf_qkv
//   python3 ctests/examples/cpp/fetch_model.py target/models      (Gemma 3 270M, under the Gemma Terms of Use)
//   ./gguf_qkv target/models/gemma-3-270m-q4_k_m.gguf
//
// The program maps the file, hands the Q, K and V weights of every layer to the library, and runs a ragged batch of
// sequences through a prefill step, a step that mixes decoding with the prompt of a newcomer, and decode steps. It then
// reads the keys and values back from their pages, compares everything with an exact product of the dequantised
// weights, and sees to it that no slot outside the sequences changed. Exit status: 0 all within the promised bound,
// 1 not, 2 unusable file or options, 3 a call failed.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "gguf.hpp"
#include "model.hpp"
#include "pkv.hpp"
#include "synthetic.hpp"

namespace {

struct Options {
    std::string path, save;
    bool synthetic = false, inspect = false, pack = true, exact = false;
    std::int32_t cache_dtype = PKV_F32;
    std::uint32_t threads = 0;
};

constexpr const char* usage =
    "usage: gguf_qkv [options] MODEL.gguf\n"
    "       gguf_qkv [options] --synthetic [--save FILE]    a small model made in memory (and written to FILE)\n"
    "  --inspect                   name the attention weights of every layer and stop\n"
    "  --pack | --borrow           repack the weights for this machine (default), or use them as they lie in the file\n"
    "  --compute default|f32       8-bit activations, as GGUF engines do (default), or exact f32 products\n"
    "  --cache f32|f16|bf16        type of the KV cache (default f32: the check then sees the products alone)\n"
    "  --threads N                 0, the default: all cores this process may use\n";

struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A sequence of known text: the first `prompt` tokens come at once in step `joins`, the rest one a step, as a sampler
// would bring them. When its text has ended it stays in the batch and brings no new tokens.
struct Sequence {
    std::vector<std::uint32_t> tokens;
    std::uint32_t prompt, joins;
    std::uint32_t cached = 0;
    std::vector<std::uint32_t> pages;  // page number -> block of the collection
    std::size_t first_row = 0;         // where its tokens start in the list of all tokens

    std::uint32_t length() const { return static_cast<std::uint32_t>(tokens.size()); }
    std::uint32_t new_tokens(std::uint32_t step) const {
        if (step < joins || cached == length()) return 0;
        return cached == 0 ? prompt : 1;
    }
};

constexpr std::uint32_t page_size = 16, num_steps = 18, spare_blocks = 5;
constexpr const char* text =
    "The cache of a language model holds the keys and values of every token it has read, and most of the memory that "
    "a server has goes into it. Sequences come and go, and no one knows beforehand how long each of them will be, so "
    "the cache is cut into pages of a few tokens, and every sequence has a table that says where its pages lie. A new "
    "token asks for its query, its key and its value; the query is used at once, while the key and the value are "
    "written into the last page of the sequence. In the morning the harbour was quiet. Three small boats lay on the "
    "sand, their nets still wet, and an old man counted the fish that his daughter had caught during the night. How "
    "many integers below one hundred are divisible by seven? There are fourteen of them.";

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
    return values[values.size() / 2];
}

std::vector<Sequence> make_sequences(const gguf::File& file, const Model& model) {
    struct Plan {
        std::uint32_t prompt, generated, joins;
    };
    const Plan plans[] = {
        {24, num_steps - 1, 0}, {1, 6, 0}, {40, num_steps - 1, 0}, {7, num_steps - 1, 0}, {12, num_steps - 2, 1}};
    std::size_t total = 0;
    for (const Plan& plan : plans) total += plan.prompt + plan.generated;
    auto tokens = tokenize(file, text, model.embeddings.rows, total);
    std::vector<Sequence> sequences;
    std::size_t first = 0;
    for (const Plan& plan : plans) {
        Sequence sequence{};
        auto start = tokens.begin() + static_cast<std::ptrdiff_t>(first);
        sequence.tokens.assign(start, start + plan.prompt + plan.generated);
        sequence.prompt = plan.prompt;
        sequence.joins = plan.joins;
        sequence.first_row = first;
        first += sequence.tokens.size();
        sequences.push_back(std::move(sequence));
    }
    return sequences;
}

struct LayerWeights {
    pkv::Weight q, k, v;
};

pkv::Weight hand_over(const pkv_context* context, const gguf::Matrix& matrix, bool pack) {
    auto options = pkv::make<pkv_gguf_weight_options>();
    options.data = matrix.data;
    options.data_size = matrix.bytes();
    options.rows = static_cast<std::int64_t>(matrix.rows);
    options.cols = static_cast<std::int64_t>(matrix.cols);
    options.encoding = static_cast<std::int32_t>(matrix.encoding->id);
    options.flags = pack ? PKV_WEIGHT_PACK : 0;
    return pkv::create_weight(context, options);
}

pkv_tensor bias_tensor(const std::vector<float>& bias) {
    return bias.empty() ? pkv_tensor{} : pkv::tensor(bias, {bias.size()});
}

pkv_qkv_matmul_gguf_params qkv_params(const pkv::Collection& collection, const pkv_batch& batch, const Layer& layer,
                                      const LayerWeights& weights, std::size_t index, const Options& options) {
    auto params = pkv::make<pkv_qkv_matmul_gguf_params>();
    params.collection = collection.get();
    params.batch = &batch;
    params.q_weight = weights.q.get();
    params.k_weight = weights.k.get();
    params.v_weight = weights.v.get();
    params.layer_idx = static_cast<std::uint32_t>(index);
    params.compute = options.exact ? PKV_COMPUTE_F32 : PKV_COMPUTE_DEFAULT;
    params.q_bias = bias_tensor(layer.q_bias);
    params.k_bias = bias_tensor(layer.k_bias);
    params.v_bias = bias_tensor(layer.v_bias);
    return params;
}

// Keys (kv_idx 0) or values (1) of every sequence, read back from the pages in the order of the list of all tokens.
std::vector<float> read_back(const pkv::Context& context, const pkv::Collection& collection,
                             const std::vector<Sequence>& sequences, const Model& model, std::uint32_t layer,
                             std::uint32_t kv_idx, std::uint32_t max_pages) {
    pkv::Batch batch(max_pages);
    std::vector<std::uint32_t> buffer_row_offsets{0}, cache_offsets;
    for (const Sequence& sequence : sequences) {
        batch.add(0, sequence.cached, sequence.pages);
        buffer_row_offsets.push_back(buffer_row_offsets.back() + sequence.cached);
        cache_offsets.push_back(0);
    }
    std::vector<float> rows(std::size_t{buffer_row_offsets.back()} * model.num_kv_heads * model.head_size);
    pkv_batch view = batch.view();
    auto params = pkv::make<pkv_kv_gather_params>();
    params.collection = collection.get();
    params.batch = &view;
    params.layer_idx = layer;
    params.kv_idx = kv_idx;
    params.buffer_row_offsets = buffer_row_offsets.data();
    params.cache_offsets = cache_offsets.data();
    params.out = pkv::tensor(rows, {buffer_row_offsets.back(), model.num_kv_heads, model.head_size});
    PKV_CALL(pkv_kv_gather, context.get(), pkv::no_stream, &params, pkv_buffer{});
    return rows;
}

// How many bytes outside the sequences' own slots no longer hold `poison`.
std::size_t count_touched(const std::vector<std::uint8_t>& blocks, std::uint8_t poison,
                          const std::vector<Sequence>& sequences, std::size_t num_blocks, std::size_t planes,
                          std::size_t row_bytes) {
    std::vector<std::uint32_t> used(num_blocks, 0);  // slots of each block that belong to a sequence
    for (const Sequence& sequence : sequences)
        for (std::size_t page = 0; page < sequence.pages.size(); page++)
            used[sequence.pages[page]] =
                std::min<std::uint32_t>(page_size, sequence.cached - static_cast<std::uint32_t>(page) * page_size);
    std::size_t touched = 0;
    const std::uint8_t* at = blocks.data();
    for (std::size_t block = 0; block < num_blocks; block++)
        for (std::size_t plane = 0; plane < planes; plane++)  // key or value of one layer
            for (std::uint32_t slot = 0; slot < page_size; slot++, at += row_bytes)
                if (slot >= used[block])
                    touched += row_bytes - static_cast<std::size_t>(std::count(at, at + row_bytes, poison));
    return touched;
}

int run(const Options& options) {
    // The model: a mapped file, or one made up.
    if (options.synthetic && !options.save.empty()) {
        auto bytes = gguf::synthetic_file();
        std::ofstream out(options.save, std::ios::binary);
        if (!out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size())).flush())
            throw gguf::Error("cannot write " + options.save);
    }
    gguf::File file(options.synthetic ? gguf::Bytes::own(gguf::synthetic_file()) : gguf::Bytes::map(options.path));
    Model model(file);
    std::size_t weight_bytes = 0;
    for (const Layer& layer : model.layers) weight_bytes += layer.q.bytes() + layer.k.bytes() + layer.v.bytes();
    std::printf("model      %s, %s (GGUF v%u, %.1f MB, %zu tensors)\n",
                options.synthetic ? "synthetic" : options.path.c_str(), gguf::File::quoted(model.architecture).c_str(),
                file.version(), static_cast<double>(file.size()) / 1e6, file.tensor_count());
    std::printf(
        "attention  %zu of %zu layers, width %zu, %zu query and %zu key heads of %zu, %.1f MB of Q, K and V weights\n",
        model.layers.size(), model.block_count, model.width, model.num_heads, model.num_kv_heads, model.head_size,
        static_cast<double>(weight_bytes) / 1e6);

    if (options.inspect) {
        for (const Layer& layer : model.layers)
            std::printf("layer %-4zu q %zu x %zu %s, k %zu x %zu %s, v %zu x %zu %s%s\n", layer.number, layer.q.rows,
                        layer.q.cols, layer.q.encoding->name, layer.k.rows, layer.k.cols, layer.k.encoding->name,
                        layer.v.rows, layer.v.cols, layer.v.encoding->name,
                        layer.q_bias.empty() ? "" : ", with biases");
        return 0;
    }

    // The library: a context, the weights of every layer, a collection in memory of our own.
    pkv::Context context = pkv::create_context(options.threads);
    std::printf("library    %s, %u threads\n", pkv_build_info(), pkv_context_num_threads(context.get()));
    double started = seconds_now();
    std::vector<LayerWeights> weights;
    for (const Layer& layer : model.layers)
        weights.push_back({hand_over(context.get(), layer.q, options.pack),
                           hand_over(context.get(), layer.k, options.pack),
                           hand_over(context.get(), layer.v, options.pack)});
    std::printf("weights    %s in %.0f ms, %s\n", options.pack ? "packed" : "borrowed", (seconds_now() - started) * 1e3,
                options.exact ? "f32 products" : "8-bit activations");

    std::vector<Sequence> sequences = make_sequences(file, model);
    std::uint32_t num_blocks = spare_blocks, max_pages = 0;
    for (const Sequence& sequence : sequences) {
        std::uint32_t pages = (sequence.length() + page_size - 1) / page_size;
        num_blocks += pages;
        max_pages = std::max(max_pages, pages);
    }
    std::vector<std::uint32_t> free_blocks(num_blocks);  // in no order at all, as after hours of serving
    std::iota(free_blocks.begin(), free_blocks.end(), 0u);
    std::shuffle(free_blocks.begin(), free_blocks.end(), std::mt19937(7));

    auto shape = pkv::make<pkv_collection_options>();
    shape.dtype = options.cache_dtype;
    shape.num_blocks = num_blocks;
    shape.num_layers = static_cast<std::uint32_t>(model.layers.size());
    shape.page_size = page_size;
    shape.num_heads = static_cast<std::uint32_t>(model.num_kv_heads);
    shape.head_size = static_cast<std::uint32_t>(model.head_size);
    std::size_t blocks_bytes = 0, scales_bytes = 0;
    PKV_CALL(pkv_collection_storage_size, &shape, &blocks_bytes, &scales_bytes);
    constexpr std::uint8_t poison = 0xFF;  // NaN in every type: read by mistake, it would show in the results
    std::vector<std::uint8_t> blocks(blocks_bytes, poison);
    shape.blocks = {blocks.data(), blocks.size()};
    pkv::Collection collection = pkv::create_collection(context.get(), shape);

    // Scratch memory once, for the largest step there is. A query looks at shapes only.
    std::vector<std::uint32_t> all_tokens;
    for (const Sequence& sequence : sequences)
        all_tokens.insert(all_tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
    const std::size_t q_rows = model.num_heads * model.head_size;
    pkv::Workspace workspace;
    {
        pkv::Batch largest(max_pages);
        for (const Sequence& sequence : sequences) largest.add(sequence.length(), 0, {});
        pkv_batch batch = largest.view();
        for (std::size_t i = 0; i < weights.size(); i++) {
            auto params = qkv_params(collection, batch, model.layers[i], weights[i], i, options);
            params.hidden_state = pkv::tensor(nullptr, PKV_F32, {all_tokens.size(), model.width});
            params.q_output = pkv::tensor(nullptr, PKV_F32, {all_tokens.size(), q_rows});
            std::size_t bytes = 0;
            PKV_CALL(pkv_qkv_matmul_gguf_workspace_size, context.get(), &params, &bytes);
            workspace.reserve(bytes);
        }
    }

    // The steps. In each: give every sequence the pages its new tokens need, describe the batch, run all layers.
    std::vector<std::vector<float>> queries(model.layers.size(), std::vector<float>(all_tokens.size() * q_rows));
    std::vector<double> prefill_seconds(model.layers.size());
    std::vector<std::vector<double>> decode_seconds(model.layers.size());
    std::size_t prefill_rows = 0, decode_rows = 0;
    for (std::uint32_t step = 0; step < num_steps; step++) {
        pkv::Batch batch(max_pages);
        std::vector<std::uint32_t> tokens;
        std::vector<std::size_t> rows;  // of the list of all tokens
        bool decode_only = true;
        for (Sequence& sequence : sequences) {
            std::uint32_t count = sequence.new_tokens(step);
            while (sequence.pages.size() * page_size < sequence.cached + count) {
                sequence.pages.push_back(free_blocks.back());
                free_blocks.pop_back();
            }
            batch.add(count, sequence.cached, sequence.pages);
            for (std::uint32_t i = 0; i < count; i++) {
                tokens.push_back(sequence.tokens[sequence.cached + i]);
                rows.push_back(sequence.first_row + sequence.cached + i);
            }
            decode_only &= sequence.cached > 0;
        }
        pkv_batch view = batch.view();
        std::vector<float> q_output(tokens.size() * q_rows);

        for (std::size_t i = 0; i < model.layers.size(); i++) {
            std::vector<float> hidden = model.hidden_states(model.layers[i], tokens);
            auto params = qkv_params(collection, view, model.layers[i], weights[i], i, options);
            params.hidden_state = pkv::tensor(hidden, {tokens.size(), model.width});
            params.q_output = pkv::tensor(q_output, {tokens.size(), q_rows});
            double best = 1e30;
            const int runs = step == 0 ? 3 : 1;  // the prompt once more, for a timing without first-touch costs
            for (int run = 0; run < runs && (run == 0 || best < 0.1); run++) {
                double start = seconds_now();
                PKV_CALL(pkv_qkv_matmul_gguf, context.get(), pkv::no_stream, &params, workspace.buffer());
                best = std::min(best, seconds_now() - start);
            }
            if (step == 0) prefill_seconds[i] = best;
            if (decode_only) decode_seconds[i].push_back(best);
            for (std::size_t t = 0; t < rows.size(); t++)
                std::copy_n(q_output.begin() + static_cast<std::ptrdiff_t>(t * q_rows), q_rows,
                            queries[i].begin() + static_cast<std::ptrdiff_t>(rows[t] * q_rows));
        }
        for (Sequence& sequence : sequences) sequence.cached += sequence.new_tokens(step);
        if (step == 0) prefill_rows = tokens.size();
        if (decode_only) decode_rows = tokens.size();
    }
    std::size_t pages_used = num_blocks - free_blocks.size();
    std::printf("batch      %zu sequences, %zu tokens in %u steps; %zu pages of %u tokens\n\n", sequences.size(),
                all_tokens.size(), num_steps, pages_used, page_size);

    // The table, and the check of each layer.
    std::printf("%-33sprefill, %zu rows  decode, %zu rows   relative error, that of ideal 8-bit activations\n", "",
                prefill_rows, decode_rows);
    std::printf("%-31s %9s %8s %8s %7s   %-20s%-20s%-18s pages\n", "layer  Q / K / V encodings", "us", "GFLOP/s", "us",
                "GB/s", "Q", "K", "V");
    const double storage_rounding = options.cache_dtype == PKV_F16    ? 0x1p-11
                                    : options.cache_dtype == PKV_BF16 ? 0x1p-8
                                                                      : 0;
    int broken = 0;
    double prefill_total = 0, decode_total = 0;
    for (std::size_t i = 0; i < model.layers.size(); i++) {
        const Layer& layer = model.layers[i];
        const auto index = static_cast<std::uint32_t>(i);
        Activations activations(model.hidden_states(layer, all_tokens), model.width);
        auto keys = read_back(context, collection, sequences, model, index, 0, max_pages);
        auto values = read_back(context, collection, sequences, model, index, 1, max_pages);
        const Errors errors[] = {compare(layer.q, layer.q_bias, activations, queries[i], options.exact, 0),
                                 compare(layer.k, layer.k_bias, activations, keys, options.exact, storage_rounding),
                                 compare(layer.v, layer.v_bias, activations, values, options.exact, storage_rounding)};
        double multiply_adds =
            static_cast<double>((layer.q.rows + layer.k.rows + layer.v.rows) * model.width * prefill_rows);
        double bytes = static_cast<double>(layer.q.bytes() + layer.k.bytes() + layer.v.bytes());
        double decode = median(decode_seconds[i]);
        prefill_total += prefill_seconds[i];
        decode_total += decode;
        std::string encodings =
            std::string(layer.q.encoding->name) + " / " + layer.k.encoding->name + " / " + layer.v.encoding->name;
        std::printf("%5zu  %-25s %8.0f  %8.1f %8.0f %8.2f ", layer.number, encodings.c_str(), prefill_seconds[i] * 1e6,
                    2 * multiply_adds / prefill_seconds[i] / 1e9, decode * 1e6, bytes / decode / 1e9);
        for (const Errors& e : errors) {
            broken += !e.within();
            char ideal[16] = "   exact";  // float weights take no 8-bit activations
            if (e.ideal > 0) std::snprintf(ideal, sizeof ideal, "%.2e", e.ideal);
            std::printf("   %.2e%s%s", e.library, e.within() ? " " : "!", ideal);
        }
        std::printf("  %5zu\n", pages_used);
    }
    std::printf("\nall layers: prefill %.2f ms (%.0f tokens/s), decode step %.2f ms (%.2f GB/s of weights)\n",
                prefill_total * 1e3, static_cast<double>(prefill_rows) / prefill_total, decode_total * 1e3,
                static_cast<double>(weight_bytes) / decode_total / 1e9);

    std::size_t row_bytes = blocks.size() / (std::size_t{num_blocks} * 2 * model.layers.size() * page_size);
    std::size_t touched = count_touched(blocks, poison, sequences, num_blocks, 2 * model.layers.size(), row_bytes);
    std::printf("pages: %zu of %u used, %zu slots outside the sequences %s\n", pages_used, num_blocks,
                std::size_t{num_blocks} * page_size - all_tokens.size(), touched ? "CHANGED" : "unchanged to the bit");
    if (broken)
        std::printf("FAILED: %d errors (marked !) above the bound: 1.1 x ideal for 8-bit activations, else 1e-5\n",
                    broken);
    if (touched) std::printf("FAILED: %zu bytes outside the sequences' slots changed\n", touched);
    if (!broken && !touched) std::printf("OK: every error is within its bound\n");
    return broken || touched ? 1 : 0;
}

Options parse(int argc, char** argv) {
    Options options;
    auto value = [&](int& i) -> std::string {
        if (i + 1 >= argc) throw UsageError(std::string(argv[i]) + " needs a value");
        return argv[++i];
    };
    for (int i = 1; i < argc; i++) {
        std::string argument = argv[i];
        if (argument == "--synthetic") options.synthetic = true;
        else if (argument == "--save") options.save = value(i);
        else if (argument == "--inspect") options.inspect = true;
        else if (argument == "--pack") options.pack = true;
        else if (argument == "--borrow") options.pack = false;
        else if (argument == "--compute") {
            std::string mode = value(i);
            if (mode != "default" && mode != "f32") throw UsageError("--compute " + mode + " does not exist");
            options.exact = mode == "f32";
        } else if (argument == "--cache") {
            std::string dtype = value(i);
            if (dtype == "f32") options.cache_dtype = PKV_F32;
            else if (dtype == "f16") options.cache_dtype = PKV_F16;
            else if (dtype == "bf16") options.cache_dtype = PKV_BF16;
            else throw UsageError("--cache " + dtype + " does not exist");
        } else if (argument == "--threads") {
            std::string count = value(i);
            if (count.empty() || count.size() > 4 || count.find_first_not_of("0123456789") != std::string::npos)
                throw UsageError("--threads " + count + " is not a number of threads");
            options.threads = static_cast<std::uint32_t>(std::stoul(count));
        } else if (!argument.empty() && argument[0] == '-') throw UsageError("unknown option " + argument);
        else if (!options.path.empty()) throw UsageError("more than one model given");
        else options.path = argument;
    }
    if (options.synthetic != options.path.empty())
        throw UsageError(options.synthetic ? "a model and --synthetic exclude each other" : "no model given");
    if (!options.save.empty() && !options.synthetic) throw UsageError("--save goes with --synthetic");
    return options;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc == 2 && (!std::strcmp(argv[1], "--help") || !std::strcmp(argv[1], "-h"))) {
        std::printf("%s", usage);
        return 0;
    }
    Options options;
    try {
        options = parse(argc, argv);
        return run(options);
    } catch (const UsageError& error) {
        std::fprintf(stderr, "gguf_qkv: %s\n%s", error.what(), usage);
        return 2;
    } catch (const gguf::Error& error) {
        std::fprintf(stderr, "gguf_qkv: %s: %s\n", options.synthetic ? "synthetic model" : options.path.c_str(),
                     error.what());
        return 2;
    } catch (const pkv::Error& error) {
        std::fprintf(stderr, "gguf_qkv: %s\n", error.what());
        return error.status == PKV_ERR_UNSUPPORTED ? 2 : 3;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "gguf_qkv: out of memory\n");
        return 3;
    }
}
