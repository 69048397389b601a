// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/cudnn_convolution.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "examples/nn/cuda_matmul.h"
#include "examples/nn/device.h"
#include "examples/nn/trial.h"

namespace nn::cudnn {
namespace {

constexpr size_t kWorkspaceBytes = size_t{128} << 20;
// Plans that are tried for one pass, of cuDNN's ranking.
constexpr size_t kMostCandidates = 16;

enum Id : int64_t { kX = 1, kW, kY, kAdded, kSums, kSquares, kProduct, kBiased };

// One of cuDNN's descriptors.
class Descriptor {
 public:
  Descriptor(const Api& api, cudnnBackendDescriptorType_t type) : api_(&api) {
    Check(api.CreateDescriptor(type, &handle_), "cudnnBackendCreateDescriptor");
  }
  Descriptor(Descriptor&& other) noexcept : api_(other.api_), handle_(std::exchange(other.handle_, nullptr)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor() {
    if (handle_ != nullptr) api_->DestroyDescriptor(handle_);
  }

  cudnnBackendDescriptor_t get() const { return handle_; }

  void Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count, const void* values) {
    Check(api_->SetAttribute(handle_, name, type, count, values), "cudnnBackendSetAttribute");
  }
  template <class T>
  void Set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    Set(name, type, 1, &value);
  }
  void Set(cudnnBackendAttributeName_t name, absl::Span<const int64_t> values) {
    Set(name, CUDNN_TYPE_INT64, static_cast<int64_t>(values.size()), values.data());
  }
  void Set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    Set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, other.handle_);
  }
  // Whether cuDNN supports it.
  bool Finalize() { return api_->Finalize(handle_) == CUDNN_STATUS_SUCCESS; }
  Descriptor Finalized() && {
    Check(api_->Finalize(handle_), "cudnnBackendFinalize");
    return std::move(*this);
  }

 private:
  const Api* api_;
  cudnnBackendDescriptor_t handle_ = nullptr;
};

cudnnDataType_t TypeOf(Element element) {
  return NameOf(element, CUDNN_DATA_FLOAT, CUDNN_DATA_HALF, CUDNN_DATA_BFLOAT16);
}

using Sizes = std::array<int64_t, 4>;  // n, c, h, w

// Of an image that lies as n, h, w, c. Without memory of its own if it is an intermediate result.
Descriptor Tensor(const Api& api, int64_t id, cudnnDataType_t type, const Sizes& sizes, bool is_virtual = false) {
  const auto [n, c, h, w] = sizes;
  const Sizes strides = {h * w * c, 1, w * c, c};
  Descriptor tensor(api, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  tensor.Set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, id);
  tensor.Set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type);
  tensor.Set(CUDNN_ATTR_TENSOR_DIMENSIONS, sizes);
  tensor.Set(CUDNN_ATTR_TENSOR_STRIDES, strides);
  tensor.Set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, int64_t{16});
  tensor.Set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, is_virtual);
  return std::move(tensor).Finalized();
}

// The operations of one pass, with all that they are made of.
class Graph {
 public:
  Graph(const Context& context, Pass pass, const ConvolutionShape& s)
      : api_(context.api), pass_(pass), type_(TypeOf(context.options.element)) {
    const Sizes x_sizes = {s.rows, s.channels, s.in_height, s.in_width};
    const Sizes y_sizes = {s.rows, s.outputs, s.out_height(), s.out_width()};
    const bool biased = pass == Pass::kForwardBias || pass == Pass::kForwardBiasRelu;
    const bool added = pass == Pass::kInputGradAdded;
    const size_t x = added ? Virtual(kProduct, x_sizes) : Add(Tensor(api_, kX, type_, x_sizes));
    const size_t w = Add(Tensor(api_, kW, type_, {s.outputs, s.channels, s.kernel, s.kernel}));
    const size_t y = biased ? Virtual(kProduct, y_sizes) : Add(Tensor(api_, kY, type_, y_sizes));
    AddConvolution(s, x, w, y);
    if (biased) AddBias(y, y_sizes);
    if (pass == Pass::kForwardSums) AddSums(y, s.outputs);
    if (added) {
      const size_t image = Add(Tensor(api_, kAdded, type_, x_sizes));
      AddPointwise(CUDNN_POINTWISE_ADD, x, image, Add(Tensor(api_, kX, type_, x_sizes)));
    }
    std::vector<cudnnBackendDescriptor_t> operations;
    for (const size_t i : operations_) operations.push_back(parts_[i].get());
    Descriptor graph(api_, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.Set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(operations.size()),
              operations.data());
    graph.Set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, context.handle);
    supported_ = graph.Finalize();
    graph_ = Add(std::move(graph));
  }

  // What cuDNN would take, best first.
  std::vector<Descriptor> EngineConfigs(cudnnBackendHeurMode_t mode) const {
    std::vector<Descriptor> configs;
    Descriptor heuristics(api_, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    heuristics.Set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, parts_[graph_]);
    heuristics.Set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
    if (!supported_ || !heuristics.Finalize()) return configs;
    int64_t count = 0;
    if (api_.GetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, &count,
                          nullptr) != CUDNN_STATUS_SUCCESS) {
      return configs;
    }
    std::vector<cudnnBackendDescriptor_t> handles;
    for (int64_t i = 0; i < count; ++i) {
      configs.emplace_back(api_, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
      handles.push_back(configs.back().get());
    }
    Check(api_.GetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count,
                            &count, handles.data()),
          "cudnnBackendGetAttribute");
    while (static_cast<int64_t>(configs.size()) > count) configs.pop_back();
    return configs;
  }

 private:
  size_t Add(Descriptor part) {
    parts_.push_back(std::move(part));
    return parts_.size() - 1;
  }
  size_t Virtual(int64_t id, const Sizes& sizes) { return Add(Tensor(api_, id, CUDNN_DATA_FLOAT, sizes, true)); }

  void AddConvolution(const ConvolutionShape& s, size_t x, size_t w, size_t y) {
    const std::array<int64_t, 2> paddings = {s.padding, s.padding}, strides = {s.stride, s.stride}, ones = {1, 1};
    Descriptor convolution(api_, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    convolution.Set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    convolution.Set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, CUDNN_CROSS_CORRELATION);
    convolution.Set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, int64_t{2});
    convolution.Set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, paddings);
    convolution.Set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, paddings);
    convolution.Set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, strides);
    convolution.Set(CUDNN_ATTR_CONVOLUTION_DILATIONS, ones);
    const size_t how = Add(std::move(convolution).Finalized());

    struct Names {
      cudnnBackendDescriptorType_t operation;
      cudnnBackendAttributeName_t how, x, w, y, alpha, beta;
    };
    constexpr Names kForward = {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                                CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
    constexpr Names kInputGrad = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                                  CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
    constexpr Names kWeightGrad = {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                                   CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
    const Names& names = pass_ == Pass::kInputGrad || pass_ == Pass::kInputGradAdded ? kInputGrad
                         : pass_ == Pass::kWeightGrad                                ? kWeightGrad
                                                                                     : kForward;
    Descriptor operation(api_, names.operation);
    operation.Set(names.how, parts_[how]);
    operation.Set(names.x, parts_[x]);
    operation.Set(names.w, parts_[w]);
    operation.Set(names.y, parts_[y]);
    operation.Set(names.alpha, CUDNN_TYPE_FLOAT, 1.0f);
    operation.Set(names.beta, CUDNN_TYPE_FLOAT, 0.0f);
    AddOperation(std::move(operation).Finalized());
  }

  void AddBias(size_t product, const Sizes& sizes) {
    const bool relu = pass_ == Pass::kForwardBiasRelu;
    const size_t bias = Add(Tensor(api_, kAdded, CUDNN_DATA_FLOAT, {1, sizes[1], 1, 1}));
    const size_t y = Add(Tensor(api_, kY, type_, sizes));
    const size_t sum = relu ? Virtual(kBiased, sizes) : y;
    AddPointwise(CUDNN_POINTWISE_ADD, product, bias, sum);
    if (relu) AddPointwise(CUDNN_POINTWISE_RELU_FWD, sum, std::nullopt, y);
  }

  void AddSums(size_t y, int64_t outputs) {
    Descriptor operation(api_, CUDNN_BACKEND_OPERATION_GEN_STATS_DESCRIPTOR);
    operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_MODE, CUDNN_TYPE_GENSTATS_MODE, CUDNN_GENSTATS_SUM_SQSUM);
    operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_XDESC, parts_[y]);
    const size_t sums = Add(Tensor(api_, kSums, CUDNN_DATA_FLOAT, {1, outputs, 1, 1}));
    const size_t squares = Add(Tensor(api_, kSquares, CUDNN_DATA_FLOAT, {1, outputs, 1, 1}));
    operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_SUMDESC, parts_[sums]);
    operation.Set(CUDNN_ATTR_OPERATION_GENSTATS_SQSUMDESC, parts_[squares]);
    AddOperation(std::move(operation).Finalized());
  }

  void AddPointwise(cudnnPointwiseMode_t mode, size_t x, std::optional<size_t> b, size_t y) {
    Descriptor how(api_, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    how.Set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    how.Set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    if (mode == CUDNN_POINTWISE_RELU_FWD) {
      how.Set(CUDNN_ATTR_POINTWISE_NAN_PROPAGATION, CUDNN_TYPE_NAN_PROPOGATION, CUDNN_PROPAGATE_NAN);
    }
    const size_t pointwise = Add(std::move(how).Finalized());
    Descriptor operation(api_, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, parts_[pointwise]);
    operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, parts_[x]);
    if (b.has_value()) operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, parts_[*b]);
    operation.Set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, parts_[y]);
    AddOperation(std::move(operation).Finalized());
  }

  void AddOperation(Descriptor operation) { operations_.push_back(Add(std::move(operation))); }

  const Api& api_;
  const Pass pass_;
  const cudnnDataType_t type_;
  std::vector<Descriptor> parts_;
  std::vector<size_t> operations_;  // among the parts
  size_t graph_ = 0;
  bool supported_ = false;
};

// Whether its arithmetic is what was asked for.
bool IsAllowed(const Context& context, const Descriptor& config) {
  const Api& api = context.api;
  const Descriptor engine(api, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t handle = engine.get();
  int64_t count = 0;
  Check(api.GetAttribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &handle),
        "cudnnBackendGetAttribute");
  std::array<cudnnBackendNumericalNote_t, CUDNN_NUMERICAL_NOTE_TYPE_COUNT> notes;
  Check(api.GetAttribute(handle, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE,
                         static_cast<int64_t>(notes.size()), &count, notes.data()),
        "cudnnBackendGetAttribute");
  const Context::Options& o = context.options;
  const bool exact = o.element == Element::kFloat32 && !o.tf32;
  count = std::min(count, static_cast<int64_t>(notes.size()));  // a newer cuDNN may know of more
  return std::none_of(notes.begin(), notes.begin() + count, [&](cudnnBackendNumericalNote_t note) {
    switch (note) {
      case CUDNN_NUMERICAL_NOTE_TENSOR_CORE:
        return exact;
      case CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS:
      case CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION:
        return true;
      case CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC:
        return o.deterministic;
      default:
        return false;
    }
  });
}

}  // namespace

void Check(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return;
  throw DeviceError(absl::StrCat(call, ": ", Load().GetErrorString(status),
                                 "; with CUDNN_LOGLEVEL_DBG=1 and CUDNN_LOGDEST_DBG=stderr cuDNN says why"));
}

class Plan {
 public:
  explicit Plan(Descriptor plan) : plan_(std::move(plan)) {}

  // The tensors as cuDNN takes them in every run.
  Descriptor Bind(const Context& context, const Tensors& t) const {
    std::vector<int64_t> ids;
    std::vector<const void*> pointers;
    for (const auto& [id, pointer] :
         {std::pair(kX, t.x), std::pair(kW, t.w), std::pair(kY, t.y), std::pair(kAdded, t.added),
          std::pair(kSums, t.sums), std::pair(kSquares, t.squares)}) {
      if (pointer == nullptr) continue;
      ids.push_back(id);
      pointers.push_back(pointer);
    }
    const auto count = static_cast<int64_t>(ids.size());
    Descriptor pack(context.api, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    pack.Set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, ids.data());
    pack.Set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers.data());
    pack.Set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, context.workspace);
    return std::move(pack).Finalized();
  }
  cudnnStatus_t Run(const Context& context, const Descriptor& pack) const {
    return context.api.Execute(context.handle, plan_.get(), pack.get());
  }

 private:
  Descriptor plan_;
};

namespace {

// Null where it cannot be had, or wants more memory than there is.
std::unique_ptr<Plan> MakePlan(const Context& context, const Descriptor& config) {
  Descriptor plan(context.api, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.Set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, context.handle);
  plan.Set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  if (!plan.Finalize()) return nullptr;
  int64_t bytes = 0, count = 0;
  Check(context.api.GetAttribute(plan.get(), CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count,
                                 &bytes),
        "cudnnBackendGetAttribute");
  if (bytes > static_cast<int64_t>(kWorkspaceBytes)) return nullptr;
  return std::make_unique<Plan>(std::move(plan));
}

struct Candidate {
  size_t number;  // the same in each run: cuDNN's ranking depends on its version, the GPU and the operations
  std::unique_ptr<Plan> plan;
};

// The best `most` plans that there are, of cuDNN's ranking from `first` on.
std::vector<Candidate> Candidates(const Context& context, const Graph& graph, size_t most, size_t first = 0) {
  std::vector<Candidate> candidates;
  size_t number = 0;
  for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    if (!candidates.empty()) break;
    for (const Descriptor& config : graph.EngineConfigs(mode)) {
      const size_t here = number++;
      if (candidates.size() == most || here < first || !IsAllowed(context, config)) continue;
      if (std::unique_ptr<Plan> plan = MakePlan(context, config)) candidates.push_back({here, std::move(plan)});
    }
  }
  return candidates;
}

std::string GpuText(const Api& api, const Context::Options& options) {
  int device = 0;
  cudaDeviceProp gpu = {};
  cuda::Check(cudaGetDevice(&device), "cudaGetDevice");
  cuda::Check(cudaGetDeviceProperties(&gpu, device), "cudaGetDeviceProperties");
  return absl::StrCat(gpu.name, ", cuDNN ", api.GetVersion(), ", ",
                      NameOf(options.element, options.tf32 ? "tf32" : "float32", "float16", "bfloat16"), ":");
}

std::string TextOf(Pass pass, const ConvolutionShape& s) {
  constexpr absl::string_view kPasses[] = {
      "forward",          "forward, sums",           "forward, bias",    "forward, bias, ReLU",
      "input's gradient", "input's gradient, added", "weight's gradient"};
  return absl::StrCat(" ", kPasses[static_cast<size_t>(pass)], ", x ", s.rows, " ", s.channels, " ", s.in_height, " ",
                      s.in_width, ", w ", s.outputs, " ", s.kernel, ", stride ", s.stride, ", padding ", s.padding);
}

// Times what a GPU does.
class Stopwatch {
 public:
  explicit Stopwatch(cudaStream_t stream) : stream_(stream) {
    for (cudaEvent_t& event : events_) cuda::Check(cudaEventCreate(&event), "cudaEventCreate");
  }
  ~Stopwatch() {
    for (const cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  void Start() { cuda::Check(cudaEventRecord(events_[0], stream_), "cudaEventRecord"); }
  // The milliseconds of what was submitted since then, which it waits for.
  float Stop() {
    cuda::Check(cudaEventRecord(events_[1], stream_), "cudaEventRecord");
    cuda::Check(cudaEventSynchronize(events_[1]), "cudaEventSynchronize");
    float time = 0;
    cuda::Check(cudaEventElapsedTime(&time, events_[0], events_[1]), "cudaEventElapsedTime");
    return time;
  }

 private:
  const cudaStream_t stream_;
  cudaEvent_t events_[2] = {};
};

// Of several runs; none where one returns false. The clock starts behind others: those load the kernel, and keep the
// GPU busy while the host submits the rest, or it would be the host that is timed.
std::optional<float> TimeOf(Stopwatch& watch, absl::FunctionRef<bool()> run) {
  constexpr int kAhead = 2, kTimed = 4;
  for (int i = 0; i < kAhead + kTimed; ++i) {
    if (i == kAhead) watch.Start();
    if (!run()) return std::nullopt;
  }
  return watch.Stop();
}

}  // namespace

Context::Context(cudaStream_t stream_, const Options& options_)
    : api(Load()), options(options_), stream(stream_), remembered_(options_.plan_file), gpu_(GpuText(api, options_)) {
  Check(api.Create(&handle), "cudnnCreate");
  Check(api.SetStream(handle, stream), "cudnnSetStream");
  cuda::Check(cudaMalloc(&workspace, kWorkspaceBytes), "cudaMalloc");
}

Context::~Context() {
  plans_.clear();
  cudaFree(workspace);
  if (handle != nullptr) api.Destroy(handle);
}

const Plan* Context::PlanFor(Pass pass, const ConvolutionShape& shape, const Tensors& tensors) {
  const auto [entry, is_new] = plans_.try_emplace({pass, shape});
  std::unique_ptr<Plan>& chosen = entry->second;
  if (!is_new) return chosen.get();
  const Graph graph(*this, pass, shape);
  if (options.deterministic) {
    std::vector<Candidate> first = Candidates(*this, graph, 1);
    if (!first.empty()) chosen = std::move(first[0].plan);
    return chosen.get();
  }
  const std::string key = absl::StrCat(gpu_, TextOf(pass, shape));
  if (const std::optional<size_t> number = remembered_.Find(key)) {
    std::vector<Candidate> known = Candidates(*this, graph, 1, *number);
    if (!known.empty() && known[0].number == *number) chosen = std::move(known[0].plan);
    if (chosen != nullptr) return chosen.get();
  }
  std::vector<Candidate> candidates = Candidates(*this, graph, kMostCandidates);
  std::vector<Descriptor> packs;
  for (const Candidate& candidate : candidates) packs.push_back(candidate.plan->Bind(*this, tensors));
  Stopwatch watch(stream);
  const std::optional<size_t> fastest = FastestOf(candidates.size(), [&](size_t i) {
    return TimeOf(watch, [&] { return candidates[i].plan->Run(*this, packs[i]) == CUDNN_STATUS_SUCCESS; });
  });
  if (!fastest.has_value()) return nullptr;
  chosen = std::move(candidates[*fastest].plan);
  remembered_.Put(key, candidates[*fastest].number);
  return chosen.get();
}

bool Context::IsFaster(Pass pass, const ConvolutionShape& shape, absl::FunctionRef<bool()> together,
                       absl::FunctionRef<void()> apart) {
  if (!together()) return false;
  if (options.deterministic) return false;
  // The number is that of what the project's own kernels have been since.
  const std::string key = absl::StrCat(gpu_, TextOf(pass, shape), ", in one launch, 1");
  if (const std::optional<size_t> number = remembered_.Find(key)) return *number == 0;
  apart();  // so that trials of its plans are over
  Stopwatch watch(stream);
  const std::optional<size_t> fastest = FastestOf(2, [&](size_t i) {
    return TimeOf(watch, [&] {
      if (i == 0) return together();
      apart();
      return true;
    });
  });
  remembered_.Put(key, *fastest);
  return fastest == 0;
}

struct Convolution::Bound {
  Tensors tensors;
  Descriptor pack;
};

Convolution::Convolution(Context& context, Pass pass, const ConvolutionShape& shape)
    : context_(context), pass_(pass), shape_(shape) {}

Convolution::~Convolution() = default;

bool Convolution::Run(const Tensors& tensors) {
  if (!planned_) plan_ = context_.PlanFor(pass_, shape_, tensors);
  planned_ = true;
  if (plan_ == nullptr) return false;
  if (bound_ == nullptr || bound_->tensors != tensors) {
    bound_.reset(new Bound{tensors, plan_->Bind(context_, tensors)});
  }
  Check(plan_->Run(context_, bound_->pack), "cudnnBackendExecute");
  return true;
}

}  // namespace nn::cudnn
