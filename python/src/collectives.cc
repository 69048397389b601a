// SPDX-License-Identifier: Apache-2.0
// The collective operations of the backend.
#include <ATen/core/grad_mode.h>

#include <limits>
#include <string>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backend.h"
#include "tensors.h"

namespace ddp_torch {
namespace {

using c10d::OpType;
using ddp::Buffers;
using ddp::ProcessGroup;
using ddp::Stream;
using ddp::Work;

// The tensors that libddp works on, in place of those of the program.
Tensors Stand(const Tensors& tensors) {
  Tensors result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) result.push_back(Contiguous(tensor, true));
  return result;
}

// Gives the program's tensors what stands for them has received.
void CopyBack(const Tensors& from, const Tensors& to) {
  for (size_t i = 0; i < to.size(); ++i) {
    if (!from[i].is_same(to[i])) to[i].copy_(from[i].view(to[i].sizes()));
  }
}

void FlipTop(const at::Tensor& tensor) { tensor.bitwise_xor_(std::numeric_limits<int64_t>::min()); }

bool Differ(const Tensors& a, const Tensors& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (!a[i].is_same(b[i])) return true;
  }
  return false;
}

const Tensors& Only(const TensorLists& lists, const char* title) {
  Require(lists.size() == 1, absl::StrCat(title, ": requires a single-element output list"));
  return lists[0];
}

void RequireOne(const Tensors& tensors, const char* title) {
  Require(tensors.size() == 1, absl::StrCat(title, ": requires a single-element tensor list"));
}

// So many elements of a tensor, as libddp counts them: in bytes if it does not know their type.
size_t CountOf(const at::Tensor& tensor, int64_t elements) {
  ddp::DType known;
  const bool knows = ddp::internal::DTypeOf(tensor.scalar_type(), &known);
  return static_cast<size_t>(elements) * (knows ? 1 : tensor.element_size());
}

std::vector<size_t> CountsOf(const Tensors& tensors) {
  std::vector<size_t> counts;
  for (const at::Tensor& tensor : tensors) counts.push_back(CountOf(tensor, tensor.numel()));
  return counts;
}

int64_t Elements(const Tensors& tensors) {
  int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  return elements;
}

bool Even(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != tensors[0].numel()) return false;
  }
  return true;
}

// The calls that several operations make.
Work AllGather(ProcessGroup& group, Buffers in, Buffers out, Stream stream) { return group.AllGather(in, out, stream); }

auto GatherTo(int64_t root) {
  return [root = static_cast<int>(root)](ProcessGroup& group, Buffers in, Buffers out, Stream stream) {
    return group.Gather(in, out, root, stream);
  };
}

auto AllToAllOf(std::vector<size_t> in_counts, std::vector<size_t> out_counts) {
  return [in_counts = std::move(in_counts), out_counts = std::move(out_counts)](ProcessGroup& group, Buffers in,
                                                                                Buffers out, Stream stream) {
    return group.AllToAll(in, in_counts, out, out_counts, stream);
  };
}

}  // namespace

WorkPtr DdpBackend::Move(const Operation& operation, const Tensors& in, const Tensors& out, Call call) {
  const at::NoGradGuard no_grad;
  const bool in_place = &in == &out;
  const at::Device device = (in.empty() ? out : in)[0].device();
  Tensors from = in_place ? Tensors{} : Stand(in);
  Tensors to = Stand(out);
  Tensors all = from;
  all.insert(all.end(), to.begin(), to.end());
  std::vector<ddp::Buffer> buffers = BuffersOf(all, true);
  const size_t inputs = from.size();
  Task task;
  task.start = [this, call = std::move(call), buffers = std::move(buffers), inputs, in_place, device,
                stream = ddp::CurrentStream(device), timeout = operation.timeout] {
    const absl::Span<const ddp::Buffer> span(buffers);
    const Buffers outputs(span.subspan(inputs));
    return call(GroupFor(device, timeout), in_place ? outputs : Buffers(span.first(inputs)), outputs, stream);
  };
  task.memory = std::move(all);
  if (Differ(to, out)) {
    task.run = [to = std::move(to), out] { CopyBack(to, out); };
  }
  return Submit(operation, device, in, out, std::move(task));
}

WorkPtr DdpBackend::Reduce(const Operation& operation, const c10d::ReduceOp& op, const Tensors& in, const Tensors& out,
                           ReduceCall call) {
  const at::NoGradGuard no_grad;
  RequireDense(in, operation.title);
  const Arithmetic arithmetic = ArithmeticOf(op, in[0].scalar_type(), operation.title);
  const at::Device device = in[0].device();
  const auto stand = [&](const Tensors& tensors) {
    Tensors result = Stand(tensors);
    for (at::Tensor& tensor : result) {
      tensor = arithmetic.through ? tensor.to(*arithmetic.through) : AsNumbers(tensor);
      if (arithmetic.flip) FlipTop(tensor);
    }
    return result;
  };
  // One view for both if the operation is in place, so that what stands for it is in place too.
  Tensors from = stand(in);
  Tensors to = &in == &out ? from : stand(out);
  Task task;
  task.start = [this, call = std::move(call), ins = BuffersOf(from, false), outs = BuffersOf(to, false), device,
                stream = ddp::CurrentStream(device), options = arithmetic.options, timeout = operation.timeout] {
    return call(GroupFor(device, timeout), Buffers(ins), Buffers(outs), options, stream);
  };
  task.memory = from;
  task.memory.insert(task.memory.end(), to.begin(), to.end());
  bool copies = arithmetic.through.has_value();
  for (const at::Tensor& tensor : out) copies = copies || !Contiguous(tensor, false).is_same(tensor);
  if (copies) {
    task.run = [to, out, flip = arithmetic.flip] {
      for (size_t i = 0; i < out.size(); ++i) {
        if (flip) FlipTop(to[i]);
        at::Tensor result = out[i].is_complex() && !to[i].is_complex() ? at::view_as_complex(to[i]) : to[i];
        out[i].copy_(result);
      }
    };
  }
  return Submit(operation, device, in, out, std::move(task));
}

at::Tensor DdpBackend::GatherAll(const char* title, const at::Tensor& mine, std::chrono::milliseconds timeout) {
  at::Tensor all = at::empty({size_, mine.numel()}, mine.options());
  const std::vector<ddp::Buffer> in = BuffersOf({mine}, true), out = BuffersOf({all}, true);
  Run(title, GroupFor(mine.device(), timeout).AllGather(in[0], out[0], ddp::CurrentStream(mine.device())));
  return all;
}

// Gathers what all ranks have, and combines it. The outputs are the elements of the result from the `first` one on.
WorkPtr DdpBackend::ReduceBitwise(const Operation& operation, const c10d::ReduceOp& op, const Tensors& in,
                                  const Tensors& out, int64_t first) {
  const at::NoGradGuard no_grad;
  Tensors flat;
  for (const at::Tensor& tensor : in) flat.push_back(tensor.reshape({-1}));
  const at::Device device = in[0].device();
  Task task;
  task.run = [this, mine = at::cat(flat), kind = op.op_, out, first, operation] {
    const at::Tensor all = GatherAll(operation.title, mine, operation.timeout);
    at::Tensor result = all[0].clone();
    for (int rank = 1; rank < size_; ++rank) {
      if (kind == c10d::ReduceOp::BAND) result.bitwise_and_(all[rank]);
      if (kind == c10d::ReduceOp::BOR) result.bitwise_or_(all[rank]);
      if (kind == c10d::ReduceOp::BXOR) result.bitwise_xor_(all[rank]);
    }
    int64_t at = first;
    for (const at::Tensor& tensor : out) {
      tensor.copy_(result.slice(0, at, at + tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
  };
  return Submit(operation, device, in, out, std::move(task));
}

WorkPtr DdpBackend::AllReduce(const Operation& operation, const c10d::ReduceOp& op, const Tensors& tensors) {
  RequireDense(tensors, operation.title);
  if (ArithmeticOf(op, tensors[0].scalar_type(), operation.title).bitwise) {
    return ReduceBitwise(operation, op, tensors, tensors, 0);
  }
  return Reduce(operation, op, tensors, tensors,
                [](ProcessGroup& group, Buffers in, Buffers out, const ddp::ReduceOptions& options, Stream stream) {
                  return group.AllReduce(in, out, options, stream);
                });
}

WorkPtr DdpBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Operation operation{OpType::ALLREDUCE, "ddp:all_reduce", opts.timeout, opts.asyncOp};
  RequireOne(tensors, operation.title);
  if (tensors[0].is_sparse()) return allreduce_sparse(tensors, opts);
  return AllReduce(operation, opts.reduceOp, tensors);
}

WorkPtr DdpBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  const Operation operation{OpType::ALLREDUCE_COALESCED, "ddp:all_reduce", opts.timeout, opts.asyncOp};
  return AllReduce(operation, opts.reduceOp, tensors);
}

WorkPtr DdpBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Operation operation{OpType::BROADCAST, "ddp:broadcast", opts.timeout, opts.asyncOp};
  RequireOne(tensors, operation.title);
  RequireDense(tensors, operation.title);
  const int root = static_cast<int>(opts.rootRank);
  return Move(operation, tensors, tensors, [root](ProcessGroup& group, Buffers, Buffers out, Stream stream) {
    return group.Broadcast(out, root, stream);
  });
}

WorkPtr DdpBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Operation operation{OpType::REDUCE, "ddp:reduce", opts.timeout, opts.asyncOp};
  RequireOne(tensors, operation.title);
  RequireDense(tensors, operation.title);
  const int root = static_cast<int>(opts.rootRank);
  if (ArithmeticOf(opts.reduceOp, tensors[0].scalar_type(), operation.title).bitwise) {
    return ReduceBitwise(operation, opts.reduceOp, tensors, root == rank_ ? tensors : Tensors{}, 0);
  }
  return Reduce(operation, opts.reduceOp, tensors, tensors,
                [root](ProcessGroup& group, Buffers in, Buffers out, const ddp::ReduceOptions& options, Stream stream) {
                  return group.Reduce(in, group.rank() == root ? out : Buffers(), root, options, stream);
                });
}

WorkPtr DdpBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Operation operation{OpType::ALLGATHER, "ddp:all_gather", opts.timeout, opts.asyncOp};
  RequireOne(inputs, operation.title);
  const Tensors& out = Only(outputs, operation.title);
  RequireDense(inputs, operation.title);
  RequireDense(out, operation.title);
  Require(static_cast<int>(out.size()) == size_,
          absl::StrCat(operation.title, ": the output list needs one tensor for each of ", size_, " ranks"));
  if (Even(out)) return Move(operation, inputs, out, AllGather);
  return Move(operation, inputs, out,
              [counts = CountsOf(out)](ProcessGroup& group, Buffers in, Buffers to, Stream stream) {
                return group.AllGather(in, to, counts, stream);
              });
}

WorkPtr DdpBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  const Operation operation{OpType::ALLGATHER_COALESCED, "ddp:all_gather", opts.timeout, opts.asyncOp};
  Require(!inputs.empty() && static_cast<int>(outputs.size()) == size_,
          absl::StrCat(operation.title, ": the outputs need one list for each of ", size_, " ranks"));
  Tensors out;  // in the order of the ranks
  for (const Tensors& list : outputs) {
    Require(list.size() == inputs.size(),
            absl::StrCat(operation.title,
                         ": invalid output size: each list of outputs needs as many tensors as the inputs"));
    out.insert(out.end(), list.begin(), list.end());
  }
  return Move(operation, inputs, out, AllGather);
}

WorkPtr DdpBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  const Operation operation{OpType::_ALLGATHER_BASE, "ddp:_all_gather_base", opts.timeout, opts.asyncOp};
  RequireDense({output, input}, operation.title);
  return Move(operation, {input}, {output}, AllGather);
}

// One operation of all: rank r's part of each output, in the order of the ranks.
WorkPtr DdpBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& opts) {
  const Operation operation{OpType::COALESCED, "ddp:all_gather", opts.timeout, opts.asyncOp};
  Require(!inputs.empty() && inputs.size() == outputs.size(),
          absl::StrCat(operation.title, ": needs as many outputs as inputs"));
  Tensors parts;
  for (int rank = 0; rank < size_; ++rank) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      Require(outputs[i].is_contiguous() && outputs[i].numel() == inputs[i].numel() * size_,
              absl::StrCat(operation.title, ": output ", i, " needs the elements of its input from ", size_,
                           " ranks, without gaps"));
      parts.push_back(outputs[i].view({size_, -1})[rank]);
    }
  }
  return Move(operation, inputs, parts, AllGather);
}

WorkPtr DdpBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const Operation operation{OpType::GATHER, "ddp:gather", opts.timeout, opts.asyncOp};
  RequireOne(inputs, operation.title);
  const Tensors out = opts.rootRank == rank_ ? Only(outputs, operation.title) : Tensors{};
  return Move(operation, inputs, out, GatherTo(opts.rootRank));
}

WorkPtr DdpBackend::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  const Operation operation{OpType::GATHER, "ddp:gather", opts.timeout, opts.asyncOp};
  const Tensors out = opts.rootRank == rank_ ? Tensors{output} : Tensors{};
  return Move(operation, {input}, out, GatherTo(opts.rootRank));
}

WorkPtr DdpBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) {
  const Operation operation{OpType::SCATTER, "ddp:scatter", opts.timeout, opts.asyncOp};
  RequireOne(outputs, operation.title);
  const int root = static_cast<int>(opts.rootRank);
  const Tensors in = root == rank_ ? Only(inputs, operation.title) : Tensors{};
  return Move(operation, in, outputs, [root](ProcessGroup& group, Buffers from, Buffers out, Stream stream) {
    return group.Scatter(from, out, root, stream);
  });
}

WorkPtr DdpBackend::ReduceScatter(const Operation& operation, const c10d::ReduceOp& op, const Tensors& in,
                                  const Tensors& out) {
  RequireDense(in, operation.title);
  RequireDense(out, operation.title);
  if (ArithmeticOf(op, in[0].scalar_type(), operation.title).bitwise) {
    const int64_t part = Elements(out);
    Require(Elements(in) == part * size_, absl::StrCat(operation.title, ": the inputs need ", size_, " times the ",
                                                       part, " elements of the output, not ", Elements(in)));
    return ReduceBitwise(operation, op, in, out, part * rank_);
  }
  return Reduce(operation, op, in, out,
                [](ProcessGroup& group, Buffers from, Buffers to, const ddp::ReduceOptions& options, Stream stream) {
                  return group.ReduceScatter(from, to, options, stream);
                });
}

WorkPtr DdpBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) {
  const Operation operation{OpType::REDUCE_SCATTER, "ddp:reduce_scatter", opts.timeout, opts.asyncOp};
  RequireOne(outputs, operation.title);
  const Tensors& in = Only(inputs, operation.title);
  if (Even(in)) return ReduceScatter(operation, opts.reduceOp, in, outputs);
  RequireDense(in, operation.title);
  RequireDense(outputs, operation.title);
  Require(static_cast<int>(in.size()) == size_,
          absl::StrCat(operation.title, ": the input list needs one tensor for each of ", size_, " ranks"));
  const auto mine = in.begin() + rank_;
  Require(outputs[0].numel() == mine->numel(),
          absl::StrCat(operation.title, ": the output needs ", mine->numel(), " elements, as input ", rank_,
                       " has, not ", outputs[0].numel()));
  if (ArithmeticOf(opts.reduceOp, in[0].scalar_type(), operation.title).bitwise) {
    return ReduceBitwise(operation, opts.reduceOp, in, outputs, Elements(Tensors(in.begin(), mine)));
  }
  std::vector<size_t> counts;
  for (const at::Tensor& tensor : in)
    counts.push_back(static_cast<size_t>(tensor.numel()) * (tensor.is_complex() ? 2 : 1));
  return Reduce(operation, opts.reduceOp, in, outputs,
                [counts](ProcessGroup& group, Buffers from, Buffers to, const ddp::ReduceOptions& options,
                         Stream stream) { return group.ReduceScatter(from, to, counts, options, stream); });
}

WorkPtr DdpBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& opts) {
  const Operation operation{OpType::_REDUCE_SCATTER_BASE, "ddp:_reduce_scatter_base", opts.timeout, opts.asyncOp};
  RequireDense({output, input}, operation.title);
  return ReduceScatter(operation, opts.reduceOp, {input}, {output});
}

WorkPtr DdpBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& opts) {
  const Operation operation{OpType::COALESCED, "ddp:reduce_scatter", opts.timeout, opts.asyncOp};
  Require(!inputs.empty() && inputs.size() == outputs.size(),
          absl::StrCat(operation.title, ": needs as many outputs as inputs"));
  Tensors parts;  // of the inputs, in the order of the ranks
  for (int rank = 0; rank < size_; ++rank) {
    for (const at::Tensor& input : inputs) {
      Require(input.numel() % size_ == 0,
              absl::StrCat(operation.title, ": an input has no equal parts for ", size_, " ranks"));
      parts.push_back(input.contiguous().view({size_, -1})[rank]);
    }
  }
  return ReduceScatter(operation, opts.reduceOp, parts, outputs);
}

WorkPtr DdpBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  const Operation operation{OpType::ALLTOALL_BASE, "ddp:all_to_all", opts.timeout, opts.asyncOp};
  RequireDense({output, input}, operation.title);
  if (output_splits.empty() && input_splits.empty()) {
    c10d::checkSplitSizes(input_splits, input, size_);
    return Move(operation, {input}, {output}, [](ProcessGroup& group, Buffers in, Buffers out, Stream stream) {
      return group.AllToAll(in, out, stream);
    });
  }
  const auto counts = [this](const std::vector<int64_t>& splits, const at::Tensor& tensor) {
    c10d::checkSplitSizes(splits, tensor, size_);
    const int64_t row = tensor.size(0) == 0 ? 0 : tensor.numel() / tensor.size(0);
    std::vector<size_t> result;
    for (int rank = 0; rank < size_; ++rank) {
      const int64_t rows = splits.empty() ? tensor.size(0) / size_ : splits[static_cast<size_t>(rank)];
      result.push_back(CountOf(tensor, rows * row));
    }
    return result;
  };
  return Move(operation, {input}, {output}, AllToAllOf(counts(input_splits, input), counts(output_splits, output)));
}

WorkPtr DdpBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Operation operation{OpType::ALLTOALL, "ddp:all_to_all", opts.timeout, opts.asyncOp};
  RequireDense(inputs, operation.title);
  RequireDense(outputs, operation.title);
  return Move(operation, inputs, outputs, AllToAllOf(CountsOf(inputs), CountsOf(outputs)));
}

WorkPtr DdpBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Operation operation{OpType::_ALLREDUCE_SPARSE, "ddp:sparse_all_reduce", opts.timeout, opts.asyncOp};
  RequireOne(tensors, operation.title);
  Require(tensors[0].is_sparse() && opts.reduceOp == c10d::ReduceOp::SUM,
          absl::StrCat(operation.title, ": adds sparse tensors only, by ReduceOp.SUM"));
  Task task;
  task.run = [this, tensor = tensors[0], operation] {
    const at::Tensor sum = SumSparse(operation.title, tensor.coalesce(), operation.timeout);
    tensor.copy_(sum);
  };
  return Submit(operation, tensors[0].device(), tensors, tensors, std::move(task));
}

// The elements of all ranks, with the space of the longest for each.
at::Tensor DdpBackend::SumSparse(const char* title, const at::Tensor& mine, std::chrono::milliseconds timeout) {
  const at::Tensor indices = mine.indices(), values = mine.values().contiguous();
  const at::Tensor count = at::full({1}, mine._nnz(), at::kLong);
  const at::Tensor counts = GatherAll(title, count, timeout);
  const int64_t longest = counts.max().item<int64_t>();
  if (longest == 0) return mine;
  at::Tensor padded_indices = at::zeros({longest, indices.size(0)}, indices.options());
  padded_indices.slice(0, 0, mine._nnz()).copy_(indices.t());
  std::vector<int64_t> shape = values.sizes().vec();
  shape[0] = longest;
  at::Tensor padded_values = at::zeros(shape, values.options());
  padded_values.slice(0, 0, mine._nnz()).copy_(values);
  const at::Tensor all_indices = GatherAll(title, padded_indices, timeout).view({size_, longest, indices.size(0)});
  shape.insert(shape.begin(), size_);
  const at::Tensor all_values = GatherAll(title, padded_values, timeout).view(shape);
  Tensors index_parts, value_parts;
  for (int rank = 0; rank < size_; ++rank) {
    const int64_t elements = counts[rank][0].item<int64_t>();
    index_parts.push_back(all_indices[rank].slice(0, 0, elements).t());
    value_parts.push_back(all_values[rank].slice(0, 0, elements));
  }
  return at::sparse_coo_tensor(at::cat(index_parts, 1), at::cat(value_parts), mine.sizes(), mine.options()).coalesce();
}

}  // namespace ddp_torch
