// Operators: torch's own CPU kernels, run over the device's memory without copying it.
//
// One boxed fallback serves every operator. Tensors of the device are lowered to CPU tensors over the same bytes, the
// operator is called with those, and what it returns is raised again: an argument to the tensor it came from, a view of
// one to a view, anything else to new device memory. Copies between host and device are the one exception.
#pragma once

#include <sstream>

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "runtime.h"

namespace sim {

using c10::IValue;
using torch::jit::Stack;

inline bool is_ours(const at::Tensor& x) {
  return x.defined() && x.device().type() == c10::DeviceType::PrivateUse1;
}

inline Block* block_of(const at::Tensor& x) {
  return static_cast<Block*>(x.storage().data_ptr().get_context());
}

inline at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const OnDevice here(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// A CPU tensor over the memory of `x`. It keeps nothing alive.
inline at::Tensor lower(const at::Tensor& x) {
  Block* block = block_of(x);
  if (block == nullptr) return at::detail::empty_strided_cpu(x.sizes(), x.strides(), x.scalar_type());
  TORCH_CHECK(!block->suspended, "memory of sim:", block->device, " is used while it is suspended (", block->tag, ")");
  c10::DataPtr bytes(arena(block->device).host(x.storage().data()), c10::Device(c10::DeviceType::CPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), x.storage().nbytes(), std::move(bytes));
  at::Tensor lowered = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), x.dtype());
  lowered.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return lowered;
}

// One recorded call of an operator, or one recorded copy.
struct Node {
  std::optional<c10::OperatorHandle> op;
  Stack arguments;  // lowered
  std::vector<at::Tensor> targets;  // where new results go, lowered; undefined for results that are no new ones
  std::function<void(const StreamKey&, uint64_t)> copy;  // as operation number so-and-so of a stream
};

struct Recording {
  int device;
  uint64_t first_number;  // of the blocks allocated since
  std::vector<Node> nodes;
  std::vector<at::Tensor> kept;  // the device tensors that nodes refer to
  std::map<Block*, std::string> before;  // what older memory held

  explicit Recording(int device) : device(device), first_number(Block::next_number()) {}

  void keep(const at::Tensor& x, bool written) {
    Block* block = block_of(x);
    if (block == nullptr) return;
    kept.push_back(x);
    if (written && block->number < first_number && !before.count(block)) {
      before[block] = std::string(arena(block->device).host(x.storage().data()), block->size);
    }
  }

  // Recording is no running: older memory gets its content back, newer memory holds nothing yet.
  void restore() {
    for (auto& [block, content] : before) {
      std::memcpy(arena(block->device).host(arena(block->device).base() + block->offset), content.data(), block->size);
    }
    before.clear();
    for (const at::Tensor& x : kept) {
      Block* block = block_of(x);
      if (block->number < first_number) continue;
      std::memset(arena(block->device).host(x.storage().data()), kPoison, block->size);
    }
  }

  void replay();
};

inline thread_local Recording* recording = nullptr;

// Calls `visit` with every tensor in `value`.
template <class F>
void each_tensor(const IValue& value, F visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& x : value.toTensorVector()) visit(x);
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) {
      if (element.isTensor()) visit(element.toTensor());
    }
  }
}

inline void Recording::replay() {
  at::AutoDispatchBelowADInplaceOrView below;
  const StreamKey stream = stream_of(device);
  uint64_t count;
  {
    Guard guard(lock());
    count = runtime().launch(stream);
  }
  for (Node& node : nodes) {
    if (node.copy) {
      node.copy(stream, count);
      continue;
    }
    Stack stack = node.arguments;
    node.op->callBoxed(&stack);
    auto target = node.targets.begin();
    for (const IValue& result : stack) {
      each_tensor(result, [&](const at::Tensor& x) {
        if (target->defined()) target->copy_(x);
        ++target;
      });
    }
  }
}

// One call of one operator on one device.
class Call {
 public:
  explicit Call(const c10::OperatorHandle& op) : op_(op) {}

  void run(Stack* stack) {
    const auto& schema = op_.schema();
    const size_t count = schema.arguments().size();
    const auto arguments = torch::jit::last(*stack, count);
    find_device(arguments);
    if (waits(arguments)) {
      Guard guard(lock());
      runtime().wait(toString(op_.operator_name()), Clock(runtime().clock(stream_of(device_))));
    }
    Stack lowered;
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      lowered.push_back(lower_value(arguments[i], alias != nullptr && alias->isWrite()));
    }
    {
      Guard guard(lock());
      const StreamKey stream = stream_of(device_);
      const uint64_t number = runtime().launch(stream);
      for (const Use& use : uses_) runtime().use(*use.block, stream, number, use.writes);
    }
    Node node{op_, recording ? lowered : Stack(), {}, nullptr};
    at::AutoDispatchBelowADInplaceOrView below;
    op_.callBoxed(&lowered);
    torch::jit::drop(*stack, count);
    for (const IValue& result : lowered) {
      stack->push_back(raise_value(result, node.targets));
    }
    if (recording && (schema.is_mutable() || any_new_)) {
      recording->nodes.push_back(std::move(node));
    }
  }

 private:
  struct Use {
    Block* block;
    bool writes;
  };

  void find_device(at::ArrayRef<IValue> arguments) {
    for (const IValue& argument : arguments) {
      each_tensor(argument, [&](const at::Tensor& x) {
        if (!is_ours(x)) return;
        TORCH_CHECK(
            device_ < 0 || device_ == x.device().index(), op_.operator_name(), ": tensors are on sim:", device_,
            " and on ", x.device());
        device_ = x.device().index();
      });
      if (device_ < 0 && argument.isDevice() && argument.toDevice().has_index()) device_ = argument.toDevice().index();
    }
    if (device_ < 0) device_ = current_device;
  }

  // Whether the operator's result depends on values in a way that the host has to know.
  bool waits(at::ArrayRef<IValue> arguments) const {
    const std::string& name = op_.schema().name();
    if (name == "aten::index" || name.find("index_put") != std::string::npos) {
      bool masked = false;
      each_tensor(arguments[1], [&](const at::Tensor& x) {
        masked = masked || (x.defined() && (x.scalar_type() == at::kBool || x.scalar_type() == at::kByte));
      });
      // A mask with one value from the host is masked_fill.
      return masked && !(name != "aten::index" && arguments[2].toTensor().numel() == 1 && !is_ours(arguments[2].toTensor()));
    }
    if (name == "aten::repeat_interleave") return arguments.back().isNone();
    return op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape);
  }

  at::Tensor lower_tensor(const at::Tensor& x, bool written) {
    if (!x.defined()) return x;
    if (!is_ours(x)) {
      TORCH_CHECK(
          x.device().is_cpu() && x.dim() == 0 && !written, op_.operator_name(), ": a tensor of shape ", x.sizes(), " is on ",
          x.device(), ", the others are on sim:", device_);
      at::Tensor value = x.clone();  // what it is now: by the time the device runs, the host may have changed it
      value.unsafeGetTensorImpl()->set_wrapped_number(x.unsafeGetTensorImpl()->is_wrapped_number());
      return value;
    }
    if (recording) recording->keep(x, written);
    for (const auto& [ours, lowered] : lowered_) {
      if (!ours.is_same(x)) continue;
      if (Block* block = written ? block_of(x) : nullptr) uses_.push_back({block, true});
      return lowered;
    }
    lowered_.emplace_back(x, lower(x));
    if (Block* block = block_of(x)) uses_.push_back({block, written});
    return lowered_.back().second;
  }

  IValue lower_value(const IValue& value, bool written) {
    if (value.isTensor()) return lower_tensor(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) list.push_back(lower_tensor(x, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& x : value.toOptionalTensorVector()) {
        list.push_back(x ? std::optional(lower_tensor(*x, written)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    return value;
  }

  at::Tensor raise_tensor(const at::Tensor& x, std::vector<at::Tensor>& targets) {
    targets.emplace_back();
    if (!x.defined()) return x;
    for (const auto& [ours, lowered] : lowered_) {
      if (!lowered.is_same(x)) continue;
      if (block_of(ours) == nullptr && x.numel() > 0) {  // an `out` that was empty, and was resized
        const at::Tensor made = new_like(x, targets.back());
        ours.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
      }
      if (ours.sizes() != x.sizes()) ours.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
      return ours;
    }
    for (const auto& [ours, lowered] : lowered_) {
      // By storage, not by address: an empty view has none.
      if (x.storage().is_alias_of(lowered.storage())) return view(ours, x);
    }
    return new_like(x, targets.back());
  }

  // A device tensor with the content of `x`; `target` becomes where a replay is to put it.
  at::Tensor new_like(const at::Tensor& x, at::Tensor& target) {
    any_new_ = true;
    at::Tensor made = new_tensor(device_, x.sizes(), x.strides(), x.scalar_type());
    at::Tensor lowered = lower(made);
    lowered.copy_(x);
    if (recording) {
      recording->keep(made, true);
      target = lowered;
    }
    return made;
  }

  // The device tensor that views of `ours` what `x` views of the CPU tensor over its memory.
  static at::Tensor view(const at::Tensor& ours, const at::Tensor& x) {
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), x.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
    return made;
  }

  IValue raise_value(const IValue& value, std::vector<at::Tensor>& targets) {
    if (value.isTensor()) return raise_tensor(value.toTensor(), targets);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& x : value.toTensorVector()) list.push_back(raise_tensor(x, targets));
      return list;
    }
    return value;
  }

  const c10::OperatorHandle& op_;
  int device_ = -1;
  bool any_new_ = false;
  std::vector<std::pair<at::Tensor, at::Tensor>> lowered_;  // device tensor, CPU tensor
  std::vector<Use> uses_;
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call(op).run(stack);
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(sizes[i], 1);
  return strides;
}

// aten::empty.memory_format(size, dtype, layout, device, pin_memory, memory_format)
inline void empty(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 6);
  const auto sizes = arguments[0].toIntVector();
  const auto dtype = arguments[1].toOptional<at::ScalarType>().value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  const auto device = arguments[3].toOptional<c10::Device>();
  const auto format = arguments[5].toOptional<at::MemoryFormat>().value_or(at::MemoryFormat::Contiguous);
  TORCH_CHECK(format == at::MemoryFormat::Contiguous, "the simulated device makes contiguous tensors only");
  at::Tensor made = new_tensor(
      device && device->has_index() ? device->index() : current_device, sizes, contiguous_strides(sizes), dtype);
  torch::jit::drop(*stack, 6);
  stack->emplace_back(std::move(made));
}

// aten::empty_strided(size, stride, dtype, layout, device, pin_memory)
inline void empty_strided(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 6);
  const auto dtype = arguments[2].toOptional<at::ScalarType>().value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  const auto device = arguments[4].toOptional<c10::Device>();
  at::Tensor made = new_tensor(
      device && device->has_index() ? device->index() : current_device, arguments[0].toIntVector(),
      arguments[1].toIntVector(), dtype);
  torch::jit::drop(*stack, 6);
  stack->emplace_back(std::move(made));
}

// aten::set_.source_Storage_storage_offset(self, source, storage_offset, size, stride)
inline void set_storage(const c10::OperatorHandle&, Stack* stack) {
  const auto arguments = torch::jit::last(*stack, 5);
  const at::Tensor self = arguments[0].toTensor();
  const auto sizes = arguments[3].toIntVector();
  auto strides = arguments[4].toIntVector();
  if (strides.empty()) strides = contiguous_strides(sizes);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(arguments[1].toStorage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, arguments[2].toInt());
  torch::jit::drop(*stack, 5);
  stack->emplace_back(self);
}

// aten::set_.source_Storage(self, source)
inline void set_whole_storage(const c10::OperatorHandle& op, Stack* stack) {
  const at::Tensor self = stack->at(stack->size() - 2).toTensor();
  const int64_t size = static_cast<int64_t>(stack->back().toStorage().nbytes() / self.itemsize());
  stack->emplace_back(0);
  stack->emplace_back(std::vector<int64_t>{size});
  stack->emplace_back(std::vector<int64_t>{1});
  set_storage(op, stack);
}

// A copy that may be on its way when the host goes on: pinned memory, asked for, and no conversion on the host.
inline bool goes_on(const at::Tensor& host, const at::Tensor& device, bool non_blocking) {
  return non_blocking && pinned().holds(host.data_ptr()) && host.scalar_type() == device.scalar_type();
}

// Copies from pinned memory, which the host must leave alone until it has waited.
inline void send(const at::Tensor& from, const at::Tensor& to, const StreamKey& stream, uint64_t count) {
  to.copy_(from);
  const at::Tensor sent = from.clone();
  Guard guard(lock());
  runtime().pending.push_back({stream, count, [from, sent] {
    TORCH_CHECK(
        std::memcmp(from.contiguous().data_ptr(), sent.contiguous().data_ptr(), sent.nbytes()) == 0,
        "the host changed pinned memory that the device may still have been copying from: wait for the copy first");
  }});
}

// Copies to pinned memory, which holds nothing until the host has waited.
inline void fetch(const at::Tensor& from, const at::Tensor& to, const StreamKey& stream, uint64_t count) {
  const at::Tensor arriving = from.clone();
  std::memset(to.data_ptr(), kPoison, to.is_contiguous() ? to.nbytes() : to.itemsize());
  Guard guard(lock());
  runtime().pending.push_back({stream, count, [to, arriving] {
                                 c10::InferenceMode any;  // a copy ends in whatever mode the host waits for it
                                 to.copy_(arriving);
                               }});
}

inline void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking, const StreamKey& stream, uint64_t count) {
  const at::Tensor lowered = lower(to);
  const bool later = goes_on(from, to, non_blocking);
  if (!non_blocking) runtime().wait("copy to the device", Clock(runtime().clock(stream)));
  if (recording) {
    TORCH_CHECK(later || from.dim() == 0, "a copy from memory that is not pinned cannot be recorded");
    const at::Tensor source = later ? from : from.clone();
    recording->nodes.push_back({std::nullopt, {}, {}, [source, lowered, later](const StreamKey& stream, uint64_t count) {
      later ? send(source, lowered, stream, count) : void(lowered.copy_(source));
    }});
    lowered.copy_(from);
  } else if (later) {
    send(from, lowered, stream, count);
  } else {
    lowered.copy_(from);
  }
}

inline void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking, const StreamKey& stream, uint64_t count) {
  const at::Tensor lowered = lower(from);
  if (!goes_on(to, from, non_blocking)) {
    runtime().wait("copy to the host", Clock(runtime().clock(stream)));
    to.copy_(lowered);
  } else if (recording) {
    recording->keep(from, false);
    recording->nodes.push_back({std::nullopt, {}, {}, [to, lowered](const StreamKey& stream, uint64_t count) {
      fetch(lowered, to, stream, count);
    }});
  } else {
    fetch(lowered, to, stream, count);
  }
}

// aten::_copy_from(from, to, non_blocking), where one of the two is ours: what Tensor.copy_ ends in.
inline void copy_from(const c10::OperatorHandle&, Stack* stack) {
  const bool non_blocking = torch::jit::pop(*stack).toBool();
  const at::Tensor to = torch::jit::pop(*stack).toTensor(), from = torch::jit::pop(*stack).toTensor();
  at::AutoDispatchBelowADInplaceOrView below;
  Guard guard(lock());
  const StreamKey stream = stream_of(is_ours(to) ? to.device().index() : from.device().index());
  const bool across = is_ours(from) && is_ours(to) && from.device() != to.device();
  // As with CUDA: a copy between devices waits for both current streams, and both wait for it.
  if (across) merge(runtime().clock(stream), runtime().clock(stream_of(from.device().index())));
  const uint64_t count = runtime().launch(stream);
  if (is_ours(from) && block_of(from)) runtime().use(*block_of(from), stream, count, false);
  if (is_ours(to) && block_of(to)) runtime().use(*block_of(to), stream, count, true);
  if (across) merge(runtime().clock(stream_of(from.device().index())), runtime().clock(stream));
  if (recording && is_ours(to)) recording->keep(to, true);
  if (is_ours(from) && is_ours(to)) {
    at::Tensor source = lower(from), target = lower(to);
    target.copy_(source);
    if (recording) {
      recording->keep(from, false);
      recording->nodes.push_back({std::nullopt, {}, {}, [source, target](const StreamKey&, uint64_t) { target.copy_(source); }});
    }
  } else {
    const at::Tensor& other = is_ours(to) ? from : to;
    TORCH_CHECK(other.device().is_cpu(), "no copies between sim and ", other.device());
    is_ours(to) ? to_device(from, to, non_blocking, stream, count) : to_host(from, to, non_blocking, stream, count);
  }
  stack->emplace_back(to);
}

// aten::_copy_from_and_resize(from, to)
inline void copy_from_and_resize(const c10::OperatorHandle& op, Stack* stack) {
  TORCH_CHECK(
      stack->at(stack->size() - 2).toTensor().sizes() == stack->back().toTensor().sizes(),
      "results on the simulated device are not resized: give an `out` of the right shape");
  stack->emplace_back(false);
  copy_from(op, stack);
}

inline void register_all() {
  static std::vector<c10::RegistrationHandleRAII> handles;
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto implement = [&](const char* name, const char* overload, c10::KernelFunction kernel) {
    handles.push_back(dispatcher.registerImpl(
        {name, overload}, c10::DispatchKey::PrivateUse1, std::move(kernel), std::nullopt, nullptr, "simulated device"));
  };
  implement("aten::empty", "memory_format", c10::KernelFunction::makeFromBoxedFunction<&empty>());
  implement("aten::empty_strided", "", c10::KernelFunction::makeFromBoxedFunction<&empty_strided>());
  implement("aten::set_", "source_Storage", c10::KernelFunction::makeFromBoxedFunction<&set_whole_storage>());
  implement(
      "aten::set_", "source_Storage_storage_offset", c10::KernelFunction::makeFromBoxedFunction<&set_storage>());
  implement("aten::_copy_from", "", c10::KernelFunction::makeFromBoxedFunction<&copy_from>());
  implement("aten::_copy_from_and_resize", "", c10::KernelFunction::makeFromBoxedFunction<&copy_from_and_resize>());
  handles.push_back(dispatcher.registerFallback(
      c10::DispatchKey::PrivateUse1, c10::KernelFunction::makeFromBoxedFunction<&fallback>(), "simulated device"));
}

}  // namespace sim
