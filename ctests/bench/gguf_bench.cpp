// The GGUF QKV projection beside its peers and the machine's limits, in one process and run: every answer is checked, every figure is the median of
// interleaved rounds, every ratio the median of the ratios of rounds.
//
//   gguf_bench [--types Q4_0,Q4_K] [--shapes 4096x4096,qkv,gemma] [-m 1,8,32] [--threads 2] [--rounds 9] [--seconds 0.03]
//              [--weights packed,borrowed,single] [--peer NAME SHIM LIBRARY DIRECTORY]... [--record FILE]
//
// Shapes: NxK is one matrix for the peers and the same rows split over Q, K and V for pagedkv; "qkv" is 4096 + 1024 + 1024 rows of 4096 columns, "gemma"
// 1024 + 256 + 256 rows of 640. Rows are timed hot (the same weights again and again) and, up to 16 tokens, cold (copies of the weights
// rotated past the last-level cache, as in a real decode). "single": packed weights on one thread, to see what a second is worth.
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "encodings.hpp"
#include "limits.hpp"
#include "pagedkv.h"
#include "peer.h"
#include "pkv.hpp"
#include "synthetic.hpp"

namespace {

struct Options {
    std::vector<std::string> types{"Q4_0", "Q4_K", "Q6_K"}, shapes{"4096x4096", "qkv", "gemma"};
    std::vector<int> rows{1, 2, 4, 8, 16, 32, 128, 512};
    unsigned threads = 2;
    int rounds = 9;
    double seconds = 0.03;
    std::vector<std::string> weights{"packed", "borrowed"};
    std::string record;
    struct PeerFiles {
        std::string name, shim, library, directory;
    };
    std::vector<PeerFiles> peers;
};

struct Peer {
    std::string name;
    decltype(&peer_prepare) prepare;
    decltype(&peer_set_rows) set_rows;
    decltype(&peer_run) run;
    decltype(&peer_result) result;
    decltype(&peer_free) free;
};

struct Problem {
    const gguf::Encoding* encoding;
    std::string shape;
    std::vector<std::int64_t> rows;      // of the peers' matrices
    std::vector<std::int64_t> qkv_rows;  // the same rows as Q, K and V
    std::int64_t cols, head_size;
    std::vector<std::uint8_t> weights;  // raw rows of all matrices, one after the other
    std::vector<float> activations;     // for the most tokens
    std::size_t row_bytes() const { return static_cast<std::size_t>(cols) / encoding->block_elements * encoding->block_bytes; }
    std::int64_t total_rows() const {
        std::int64_t n = 0;
        for (auto r : rows) n += r;
        return n;
    }
    double weight_bytes() const { return static_cast<double>(total_rows()) * static_cast<double>(row_bytes()); }
};

// Something that can be timed: the whole projection of m tokens.
struct Contender {
    std::string name;
    std::function<void(int m)> set_rows;
    std::function<void(bool every_copy)> run;             // with copy 0 of the weights, or with each copy once
    std::function<void()> fetch;                          // results to where element finds them
    std::function<float(int t, std::int64_t n)> element;  // token t, feature n over all matrices
};

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::stringstream stream(text);
    for (std::string part; std::getline(stream, part, ',');)
        if (!part.empty()) parts.push_back(part);
    return parts;
}

Options parse(int argc, char** argv) {
    Options options;
    auto fail = [](const std::string& text) {
        std::fprintf(stderr, "gguf_bench: %s\n", text.c_str());
        std::exit(2);
    };
    for (int i = 1; i < argc; i++) {
        std::string option = argv[i];
        auto next = [&]() -> std::string {
            if (++i >= argc) fail(option + " needs a value");
            return argv[i];
        };
        if (option == "--types") options.types = split(next());
        else if (option == "--shapes") options.shapes = split(next());
        else if (option == "--threads") options.threads = static_cast<unsigned>(std::stoul(next()));
        else if (option == "--rounds") options.rounds = std::stoi(next());
        else if (option == "--seconds") options.seconds = std::stod(next());
        else if (option == "--weights") options.weights = split(next());
        else if (option == "--record") options.record = next();
        else if (option == "--peer") {
            std::string name = next(), shim = next(), library = next();
            options.peers.push_back({name, shim, library, next()});
        } else if (option == "-m") {
            options.rows.clear();
            for (auto& m : split(next())) options.rows.push_back(std::stoi(m));
        } else fail("no such option: " + option);
    }
    return options;
}

Problem make_problem(const std::string& type, const std::string& shape, int most_rows) {
    Problem p;
    p.encoding = nullptr;
    for (auto& e : gguf::encodings)
        if (type == e.name) p.encoding = &e;
    if (!p.encoding) std::fprintf(stderr, "gguf_bench: no encoding %s\n", type.c_str()), std::exit(2);
    p.shape = shape;
    p.head_size = 128;
    if (shape == "qkv") p.rows = p.qkv_rows = {4096, 1024, 1024}, p.cols = 4096;
    else if (shape == "gemma") p.rows = p.qkv_rows = {1024, 256, 256}, p.cols = 640, p.head_size = 256;
    else {
        long n = 0, k = 0;
        if (std::sscanf(shape.c_str(), "%ldx%ld", &n, &k) != 2 || n % 512 != 0) std::fprintf(stderr, "gguf_bench: bad shape %s\n", shape.c_str()), std::exit(2);
        p.rows = {n}, p.qkv_rows = {n / 2, n / 4, n / 4}, p.cols = k;
    }
    std::mt19937 random(1);
    p.weights.resize(static_cast<std::size_t>(p.total_rows()) * p.row_bytes());
    if (static_cast<std::size_t>(p.cols) % p.encoding->block_elements == 0)
        for (std::size_t at = 0; at < p.weights.size(); at += p.encoding->block_bytes) gguf::random_block(*p.encoding, 0.02, random, p.weights.data() + at);
    std::normal_distribution<float> normal;
    p.activations.resize(static_cast<std::size_t>(most_rows) * static_cast<std::size_t>(p.cols));
    for (float& x : p.activations) x = normal(random);
    return p;
}

// pagedkv: Q to an output, K and V into pages.
class Ours {
public:
    Ours(const pkv_context* ctx, const Problem& problem, unsigned copies, std::uint32_t flags, int most_rows) : ctx_(ctx), p_(problem) {
        auto options = pkv::make<pkv_collection_options>();
        options.dtype = PKV_F32;
        options.page_size = 128;
        options.num_blocks = static_cast<std::uint32_t>((most_rows + 127) / 128);
        options.num_layers = 1;
        options.head_size = static_cast<std::uint32_t>(p_.head_size);
        options.num_heads = static_cast<std::uint32_t>(p_.qkv_rows[1] / p_.head_size);
        collection_ = pkv::create_collection(ctx, options);
        PKV_CALL(pkv_collection_key_cache, collection_.get(), 0u, &keys_);
        PKV_CALL(pkv_collection_value_cache, collection_.get(), 0u, &values_);
        for (std::uint32_t i = 0; i < options.num_blocks; i++) table_.push_back(i);
        // A borrowed weight lies in its own memory, as the packed copies do: cold means cold for both.
        if (!(flags & PKV_WEIGHT_PACK))
            for (unsigned c = 0; c < copies; c++) raw_.push_back(p_.weights);
        for (unsigned c = 0; c < copies; c++) {
            const std::uint8_t* data = flags & PKV_WEIGHT_PACK ? p_.weights.data() : raw_[c].data();
            for (std::int64_t rows : p_.qkv_rows) {
                auto weight = pkv::make<pkv_gguf_weight_options>();
                weight.data = data;
                weight.data_size = static_cast<std::size_t>(rows) * p_.row_bytes();
                weight.rows = rows;
                weight.cols = p_.cols;
                weight.encoding = static_cast<std::int32_t>(p_.encoding->id);
                weight.flags = flags;
                weights_.push_back(pkv::create_weight(ctx, weight));
                data += weight.data_size;
            }
        }
    }

    void set_rows(int m) {
        offsets_ = {0, static_cast<std::uint32_t>(m)};
        q_.assign(static_cast<std::size_t>(m) * static_cast<std::size_t>(p_.qkv_rows[0]), 0);
        batch_ = pkv::make<pkv_batch>();
        batch_.input_row_offsets = offsets_.data();
        batch_.cache_lengths = &zero_;
        batch_.lookup_table = table_.data();
        batch_.batch_size = 1;
        batch_.max_pages = static_cast<std::uint32_t>(table_.size());
        batch_.max_seq_length = static_cast<std::uint32_t>(m);
        params_ = pkv::make<pkv_qkv_matmul_gguf_params>();
        params_.collection = collection_.get();
        params_.batch = &batch_;
        params_.hidden_state = pkv::tensor(p_.activations, {static_cast<std::size_t>(m), static_cast<std::size_t>(p_.cols)});
        params_.q_output = pkv::tensor(q_, {static_cast<std::size_t>(m), static_cast<std::size_t>(p_.qkv_rows[0])});
        use(0);
        std::size_t bytes = 0;
        PKV_CALL(pkv_qkv_matmul_gguf_workspace_size, ctx_, &params_, &bytes);
        workspace_.reserve(bytes);
    }

    void run(unsigned copy) {
        use(copy);
        PKV_CALL(pkv_qkv_matmul_gguf, ctx_, pkv_stream{}, &params_, workspace_.buffer());
    }

    float element(int t, std::int64_t n) const {
        std::int64_t q = p_.qkv_rows[0], kv = p_.qkv_rows[1];
        if (n < q) return q_[static_cast<std::size_t>(t * q + n)];
        const pkv_tensor& view = n < q + kv ? keys_.blocks : values_.blocks;
        std::int64_t feature = (n - q) % kv, page = t / 128, slot = t % 128;
        return static_cast<const float*>(view.data)[page * view.stride[0] + slot * view.stride[1] + feature];
    }

private:
    void use(unsigned copy) {
        params_.q_weight = weights_[3 * copy].get();
        params_.k_weight = weights_[3 * copy + 1].get();
        params_.v_weight = weights_[3 * copy + 2].get();
    }

    const pkv_context* ctx_;
    const Problem& p_;
    pkv::Collection collection_;
    pkv_cache_view keys_{}, values_{};
    std::vector<std::vector<std::uint8_t>> raw_;
    std::vector<pkv::Weight> weights_;
    std::vector<std::uint32_t> table_, offsets_;
    std::uint32_t zero_ = 0;
    std::vector<float> q_;
    pkv_batch batch_{};
    pkv_qkv_matmul_gguf_params params_{};
    pkv::Workspace workspace_;
};

// ‖error‖ / ‖exact‖ over a sample of features and tokens.
double check(const Problem& p, const Contender& contender, int m) {
    std::vector<double> row(static_cast<std::size_t>(p.cols));
    double error = 0, norm = 0;
    for (std::int64_t n = 0; n < p.total_rows(); n += 37) {
        gguf::decode_row(*p.encoding, p.weights.data() + static_cast<std::size_t>(n) * p.row_bytes(), row.size(), row.data());
        for (int t = 0; t < m; t += std::max(1, m / 4)) {
            double exact = 0;
            for (std::size_t k = 0; k < row.size(); k++) exact += row[k] * static_cast<double>(p.activations[static_cast<std::size_t>(t) * row.size() + k]);
            double difference = exact - static_cast<double>(contender.element(t, n));
            error += difference * difference, norm += exact * exact;
        }
    }
    return std::sqrt(error / norm);
}

double percentile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    double position = share * static_cast<double>(values.size() - 1);
    auto below = static_cast<std::size_t>(position), above = std::min(below + 1, values.size() - 1);
    return values[below] + (values[above] - values[below]) * (position - static_cast<double>(below));
}

}  // namespace

int main(int argc, char** argv) try {
    Options options = parse(argc, argv);
    std::vector<Peer> peers;
    for (auto& files : options.peers) {
        void* shim = dlopen(files.shim.c_str(), RTLD_NOW | RTLD_LOCAL);
        auto* open = shim ? reinterpret_cast<decltype(&peer_open)>(dlsym(shim, "peer_open")) : nullptr;
        const char* text = open ? open(files.library.c_str(), files.directory.c_str(), options.threads) : nullptr;
        if (!text) {
            const char* why = dlerror();
            std::printf("peer %s could not be opened: %s\n", files.name.c_str(), why ? why : "it does not run here, or not on so many threads");
            continue;
        }
        std::printf("peer %s: %s\n", files.name.c_str(), text);
        peers.push_back({files.name, reinterpret_cast<decltype(&peer_prepare)>(dlsym(shim, "peer_prepare")),
                         reinterpret_cast<decltype(&peer_set_rows)>(dlsym(shim, "peer_set_rows")), reinterpret_cast<decltype(&peer_run)>(dlsym(shim, "peer_run")),
                         reinterpret_cast<decltype(&peer_result)>(dlsym(shim, "peer_result")), reinterpret_cast<decltype(&peer_free)>(dlsym(shim, "peer_free"))});
    }
    std::printf("%s\n%u threads\n", pkv_build_info(), options.threads);

    std::ostringstream record;
    record << "{\n  \"build\": \"" << pkv_build_info() << "\",\n  \"threads\": " << options.threads << ",\n  \"results\": [";
    bool first = true, wrong = false;
    pkv::Context ctx = pkv::create_context(options.threads), single = pkv::create_context(1);
    int most_rows = *std::max_element(options.rows.begin(), options.rows.end());

    for (auto& shape : options.shapes)
        for (auto& type : options.types) {
            Problem p = make_problem(type, shape, most_rows);
            if (static_cast<std::size_t>(p.cols) % p.encoding->block_elements) continue;  // 640 columns are no whole number of 256-blocks
            bool any_small = *std::min_element(options.rows.begin(), options.rows.end()) <= 16;
            // Cold: more than any cache holds. The peers' graphs take a few hundred matrices.
            unsigned copies = any_small ? std::min(static_cast<unsigned>(128e6 / p.weight_bytes()) + 2, 100u) : 1;

            std::vector<Contender> contenders;
            bench::Used packing{};  // seconds of a core for a GB, with the allocation: the system's is what fresh memory takes
            for (auto [name, flags] : {std::pair<const char*, std::uint32_t>{"packed", PKV_WEIGHT_PACK}, {"borrowed", 0u}, {"single", PKV_WEIGHT_PACK}}) {
                if (std::find(options.weights.begin(), options.weights.end(), name) == options.weights.end()) continue;
                bench::Used before = bench::used();
                auto impl = std::make_shared<Ours>(std::strcmp(name, "single") ? ctx.get() : single.get(), p, copies, flags, most_rows);
                if (!std::strcmp(name, "packed")) {
                    bench::Used after = bench::used();
                    double gigabytes = copies * p.weight_bytes() / 1e9;
                    packing = {(after.own - before.own) / gigabytes, (after.system - before.system) / gigabytes};
                }
                contenders.push_back({name, [impl](int m) { impl->set_rows(m); },
                                      [impl, copies](bool every_copy) {
                                          for (unsigned c = 0; c < (every_copy ? copies : 1); c++) impl->run(c);
                                      },
                                      [] {}, [impl](int t, std::int64_t n) { return impl->element(t, n); }});
            }
            const std::size_t first_peer = contenders.size();
            std::vector<const void*> data;
            for (std::size_t i = 0, at = 0; i < p.rows.size(); at += static_cast<std::size_t>(p.rows[i++]) * p.row_bytes()) data.push_back(p.weights.data() + at);
            for (auto& peer : peers)
                for (int repack : {0, 1}) {
                    void* handle = peer.prepare(static_cast<int>(p.encoding->id), static_cast<unsigned>(p.rows.size()), p.rows.data(), data.data(), p.cols, copies, repack);
                    if (!handle) continue;
                    auto owner = std::shared_ptr<void>(handle, peer.free);
                    auto results = std::make_shared<std::vector<std::vector<float>>>(p.rows.size());
                    auto rows = std::make_shared<int>(0);
                    contenders.push_back({peer.name + (repack ? "+repack" : ""),
                                          [=, &p](int m) {
                                              peer.set_rows(owner.get(), m, p.activations.data());
                                              for (std::size_t i = 0; i < p.rows.size(); i++) (*results)[i].resize(static_cast<std::size_t>(m * p.rows[i]));
                                              *rows = m;
                                          },
                                          [=](bool every_copy) { peer.run(owner.get(), every_copy); },
                                          [=] {
                                              for (std::size_t i = 0; i < results->size(); i++) peer.result(owner.get(), static_cast<unsigned>(i), (*results)[i].data());
                                          },
                                          [=, &p](int t, std::int64_t n) {
                                              std::size_t i = 0;
                                              while (n >= p.rows[i]) n -= p.rows[i++];
                                              return (*results)[i][static_cast<std::size_t>(t * p.rows[i] + n)];
                                          }});
                }

            // For each table: a shared machine's change with the minutes.
            bench::Limits limits = bench::measure_limits(options.threads);
            std::printf("\n%s %s: %.1f MB of weights, %u copies; limits: read %.1f GB/s, f32 FMA %.0f GFLOP/s, 8-bit %.0f GOP/s, with 16-bit sums of four %.0f GOP/s\n"
                        "GOP/s, median of %d interleaved rounds\n%-10s", type.c_str(), shape.c_str(), p.weight_bytes() / 1e6, copies, limits.read / 1e9, limits.fma / 1e9,
                        limits.maddubs / 1e9, limits.maddubs4 / 1e9, options.rounds, "rows");
            for (auto& c : contenders) std::printf(" %14s", c.name.c_str());
            std::printf("   vs best peer (quartiles)   of limit\n");
            record << (first ? "" : ",") << "\n    {\"type\": \"" << type << "\", \"shape\": \"" << shape << "\", \"packing_core_seconds_per_gb\": " << packing.own
                   << ", \"packing_system_seconds_per_gb\": " << packing.system << ", \"limits\": {\"read\": " << limits.read << ", \"fma\": " << limits.fma << ", \"maddubs\": " << limits.maddubs
                   << ", \"maddubs4\": " << limits.maddubs4 << "}}";
            first = false;
            std::vector<double> errors(contenders.size());
            for (int m : options.rows) {
                for (std::size_t i = 0; i < contenders.size(); i++) {
                    auto& c = contenders[i];
                    c.set_rows(m);
                    c.run(false);
                    c.fetch();
                    double error = check(p, c, m);
                    errors[i] = std::max(errors[i], error);
                    // Random codes and normal activations: 8-bit activations are within 1 percent of exact.
                    if (!(error < 1e-2)) {
                        std::printf("%s at %d rows is wrong: relative error %g\n", c.name.c_str(), m, error);
                        wrong = wrong || i < first_peer;
                    }
                    record << ",\n    {\"type\": \"" << type << "\", \"shape\": \"" << shape << "\", \"rows\": " << m << ", \"name\": \"" << c.name
                           << "\", \"error\": " << error << "}";
                }
                for (bool cold : {true, false}) {
                    if (cold && (m > 16 || copies == 1)) continue;
                    double work = 2.0 * m * static_cast<double>(p.total_rows()) * static_cast<double>(p.cols);
                    std::vector<std::vector<double>> times(contenders.size());
                    std::vector<int> repeats;
                    for (auto& c : contenders) {
                        double start = bench::now();
                        c.run(cold);
                        repeats.push_back(std::clamp(static_cast<int>(options.seconds / (bench::now() - start)), 1, 1000));
                    }
                    for (int round = 0; round < options.rounds; round++)
                        for (std::size_t i = 0; i < contenders.size(); i++) {
                            bench::settle();
                            // As long untimed as timed: threads that slept share a core for a while, and a core that idled is slow.
                            for (int r = 0; r < repeats[i]; r++) contenders[i].run(cold);
                            double start = bench::now();
                            for (int r = 0; r < repeats[i]; r++) contenders[i].run(cold);
                            times[i].push_back((bench::now() - start) / repeats[i] / (cold ? copies : 1));
                        }
                    std::printf("%4d %-5s", m, cold ? "cold" : "hot");
                    for (auto& t : times) std::printf(" %14.1f", work / percentile(t, 0.5) / 1e9);
                    // The peer's path that is fastest by its median, round by round.
                    std::vector<double> ratios;
                    auto slower = [](auto& a, auto& b) { return percentile(a, 0.5) < percentile(b, 0.5); };
                    auto peer = std::min_element(times.begin() + static_cast<std::ptrdiff_t>(first_peer), times.end(), slower);
                    if (peer != times.end())
                        for (std::size_t round = 0; round < peer->size(); round++) ratios.push_back((*peer)[round] / times[0][round]);
                    if (!ratios.empty()) std::printf("   %5.2f (%.2f .. %.2f)", percentile(ratios, 0.5), percentile(ratios, 0.25), percentile(ratios, 0.75));
                    double median = percentile(times[0], 0.5);
                    double bandwidth = p.weight_bytes() / median / limits.read, compute = work / median / limits.maddubs4;
                    if (limits.read > 0) std::printf("   %5.1f %% %s", 100 * std::max(cold ? bandwidth : 0, compute), cold && bandwidth > compute ? "read" : "8-bit");
                    std::printf("\n");
                    std::fflush(stdout);
                    for (std::size_t i = 0; i < contenders.size(); i++)
                        record << ",\n    {\"type\": \"" << type << "\", \"shape\": \"" << shape << "\", \"rows\": " << m << ", \"mode\": \"" << (cold ? "cold" : "hot")
                               << "\", \"name\": \"" << contenders[i].name << "\", \"seconds\": " << percentile(times[i], 0.5) << ", \"quartiles\": ["
                               << percentile(times[i], 0.25) << ", " << percentile(times[i], 0.75) << "], \"gops\": " << work / percentile(times[i], 0.5) / 1e9
                               << ", \"gbytes\": " << p.weight_bytes() / percentile(times[i], 0.5) / 1e9
                               << ", \"ratio_to_best_peer\": " << (i == 0 && !ratios.empty() ? percentile(ratios, 0.5) : 0.0) << "}";
                }
            }
            std::printf("error, %%  ");
            for (double error : errors) std::printf(" %14.2f", 100 * error);
            if (packing.own > 0) std::printf("   packing: %.2f s of a core for a GB, and %.2f of the system's", packing.own, packing.system);
            std::printf("\n");
            if (!options.record.empty()) std::ofstream(options.record) << record.str() << "\n  ]\n}\n";
        }
    return wrong ? 1 : 0;
} catch (const std::exception& problem) {
    std::fprintf(stderr, "gguf_bench: %s\n", problem.what());
    return 1;
}
