// Recorded calls of the KDA kernels, replayed without Python, and their place in autograd's graph.
//
// A `Program` is what `triton_replay.py` has recorded of one kind of call: memory to allocate, kernels to launch on
// given places of it, results. A `Call` joins the program of a forward pass and that of its backward pass into one
// node of the graph, so that autograd's device thread runs the latter without waiting for the interpreter. A backward
// pass of any other form (a final state's gradient, strides, a graph of the graph) goes to the Python function.
//
// Kernels of a call are launched as one graph of the driver's, a fifth of the time of launching them one by one. Its
// functions come as addresses, from the driver that is there; of CUDA only types are used, from Triton's cuda.h.

#include <cuda.h>
static_assert(CUDA_VERSION >= 12000, "needs the cuda.h of CUDA 12 or newer, as Triton brings it");

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;  // None in Python
using Tensors = std::vector<Tensor>;  // undefined ones where there is none

// The driver's functions, from their addresses by name. One before CUDA 12.0 has not all that graphs need.
struct Driver {
  decltype(&cuLaunchKernel) launch;
  decltype(&cuDeviceGet) device_of;
  decltype(&cuDevicePrimaryCtxRetain) primary_context;
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuCtxSetCurrent) set_context;
  decltype(&cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&cuStreamIsCapturing) is_capturing;
  decltype(&cuStreamGetPriority) priority_of;
  decltype(&cuGraphCreate) make_graph;
  decltype(&cuGraphDestroy) destroy_graph;
  decltype(&cuGraphAddKernelNode) add_kernel;
  decltype(&cuGraphInstantiate) instantiate;
  decltype(&cuGraphExecDestroy) destroy_instance;
  decltype(&cuGraphExecKernelNodeSetParams) set_parameters;
  decltype(&cuGraphLaunch) launch_graph;
  bool graphs;  // whether all are there that graphs need

  explicit Driver(const std::map<std::string, uintptr_t>& addresses) {
    const auto take = [&](auto& function, const char* name) {
      const auto found = addresses.find(name);
      const auto address = found == addresses.end() ? uintptr_t(0) : found->second;
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
      return address != 0;
    };
    const bool launches = take(launch, "cuLaunchKernel") & take(device_of, "cuDeviceGet") &
        take(primary_context, "cuDevicePrimaryCtxRetain") & take(current_context, "cuCtxGetCurrent") &
        take(set_context, "cuCtxSetCurrent") & take(is_capturing, "cuStreamIsCapturing");
    TORCH_CHECK(launches, "found no addresses of the CUDA driver's functions for contexts and launches, need them");
    graphs = take(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode") &
        take(priority_of, "cuStreamGetPriority") & take(make_graph, "cuGraphCreate") &
        take(destroy_graph, "cuGraphDestroy") & take(add_kernel, "cuGraphAddKernelNode_v2") &
        take(instantiate, "cuGraphInstantiateWithFlags") & take(destroy_instance, "cuGraphExecDestroy") &
        take(set_parameters, "cuGraphExecKernelNodeSetParams_v2") & take(launch_graph, "cuGraphLaunch");
  }
};

Tensors given(const std::vector<Maybe>& some) {
  Tensors all;
  all.reserve(some.size());
  for (const auto& one : some) {
    all.push_back(one.value_or(Tensor()));
  }
  return all;
}

std::vector<Maybe> found(const Tensors& all) {
  std::vector<Maybe> some;
  some.reserve(all.size());
  for (const auto& one : all) {
    some.push_back(one.defined() ? Maybe(one) : std::nullopt);
  }
  return some;
}

// Whether kernels may read a tensor at its address: a plain one, in memory, that begins at a multiple of 16 bytes and
// has no forward-mode tangent, which kernels would drop.
bool readable(const Tensor& x) {
  static const c10::DispatchKeySet special(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate,
       c10::DispatchKey::ZeroTensor});
  if (x.key_set().has_any(special) || x.layout() != at::kStrided || x._fw_grad(/*level=*/0).defined()) {
    return false;
  }
  const auto address = reinterpret_cast<uintptr_t>(x.const_data_ptr());
  return address % 16 == 0 && (address != 0 || x.numel() == 0);
}

// Whether a tensor lies where this thread allocates and launches: on its current card, or on the CPU.
bool here(const Tensor& x) {
  const auto device = x.device();
  return !device.is_cuda() || device == c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

// Type, device, shape and strides as bytes that differ where any of them does.
void append_form(std::string& key, const Tensor& x) {
  const auto device = x.device();
  const auto put = [&key](const void* from, size_t bytes) { key.append(static_cast<const char*>(from), bytes); };
  const char head[] = {
      '+', static_cast<char>(x.scalar_type()), static_cast<char>(device.type()), static_cast<char>(device.index()),
      static_cast<char>(x.dim())};
  put(head, sizeof(head));
  put(x.sizes().data(), x.dim() * sizeof(int64_t));
  put(x.strides().data(), x.dim() * sizeof(int64_t));
}

// The forms of tensors that kernels may read, '-' for those that are not there; nothing if they may not read one.
std::optional<std::string> forms_of(const Tensors& tensors) {
  std::string key;
  key.reserve(2048);
  for (const auto& x : tensors) {
    if (!x.defined()) {
      key.push_back('-');
    } else if (readable(x)) {
      append_form(key, x);
    } else {
      return std::nullopt;
    }
  }
  return key;
}

// Whether somebody watches or answers torch's operators, as selective checkpointing does: memory may then be other than
// asked for.
bool watched() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set();
}

struct Place {
  size_t tensor;   // an argument, the null pointer or a block
  int64_t offset;  // bytes
};

struct Launch {
  CUfunction function;
  unsigned grid, threads, shared;
  std::vector<Place> pointers;
  std::vector<uint64_t> numbers;  // bit patterns, in the low bytes

  size_t parameters() const {
    return pointers.size() + numbers.size() + 2;  // two scratch buffers of Triton's, which these kernels do not have
  }
};

void check(CUresult code) {
  TORCH_CHECK(code == CUDA_SUCCESS, "launching a KDA kernel failed with CUDA driver error ", int(code));
}

void launch_one(const Driver& driver, const Launch& launch, CUstream stream, void** parameters) {
  check(driver.launch(
      launch.function, launch.grid, 1, 1, launch.threads, 1, 1, launch.shared, stream, parameters, nullptr));
}

// While it lives, this thread makes, launches and destroys graphs without spoiling a capture of somebody else's: in the
// default mode the driver ends those for what might allocate.
class BesideCaptures {
 public:
  explicit BesideCaptures(const Driver& driver) : driver_(driver) {
    driver_.exchange_capture_mode(&mode_);
  }
  ~BesideCaptures() {
    driver_.exchange_capture_mode(&mode_);
  }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// Kernels that run one after another, as a graph of the driver's for every stream that they are launched on: launches
// of one graph wait for one another, whatever their streams.
class Chain {
 public:
  Chain(const Driver& driver, std::vector<const Launch*> launches) : driver_(driver), launches_(std::move(launches)) {}
  Chain(const Chain&) = delete;
  Chain& operator=(const Chain&) = delete;

  ~Chain() {  // instances that still run are freed by the driver when they are done
    if (!graphs_.empty()) {
      const BesideCaptures beside(driver_);
      for (const auto& one : graphs_) {
        driver_.destroy_instance(one.instance);
        driver_.destroy_graph(one.graph);
      }
    }
  }

  // Launch all, with the addresses of their parameters one after another; as a graph only if one may be launched here.
  void launch(CUstream stream, void** parameters, bool as_graph) {
    if (!as_graph || !launch_graph(stream, parameters)) {
      for (const auto* launch : launches_) {
        launch_one(driver_, *launch, stream, parameters);
        parameters += launch->parameters();
      }
    }
  }

 private:
  // False where it has to be done one by one: on a stream with a priority, on the fifth stream, by an old driver, and
  // where graphs fail; nothing has been launched then.
  bool launch_graph(CUstream stream, void** parameters) {
    if (!driver_.graphs) {
      return false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    const BesideCaptures beside(driver_);
    const auto* graph = graph_for(stream, parameters);
    if (graph == nullptr) {
      return false;
    }
    for (size_t i = 0; i < launches_.size(); ++i) {
      const auto node = node_of(*launches_[i], parameters);
      if (driver_.set_parameters(graph->instance, graph->kernels[i], &node) != CUDA_SUCCESS) {
        return false;
      }
      parameters += launches_[i]->parameters();
    }
    return driver_.launch_graph(graph->instance, stream) == CUDA_SUCCESS;
  }

  struct Graph {
    CUstream stream;
    CUgraph graph;
    CUgraphExec instance;
    std::vector<CUgraphNode> kernels;
  };

  static CUDA_KERNEL_NODE_PARAMS node_of(const Launch& launch, void** parameters) {
    CUDA_KERNEL_NODE_PARAMS node{};
    node.func = launch.function;
    node.gridDimX = launch.grid;
    node.gridDimY = node.gridDimZ = 1;
    node.blockDimX = launch.threads;
    node.blockDimY = node.blockDimZ = 1;
    node.sharedMemBytes = launch.shared;
    node.kernelParams = parameters;
    return node;
  }

  // Made by the first launch on a stream.
  const Graph* graph_for(CUstream stream, void** parameters) {
    for (const auto& one : graphs_) {
      if (one.stream == stream) {
        return &one;
      }
    }
    int priority = 0;
    if (failed_ || graphs_.size() == kGraphs || driver_.priority_of(stream, &priority) != CUDA_SUCCESS ||
        priority != 0) {
      return nullptr;
    }
    Graph made{stream, nullptr, nullptr, {}};
    failed_ = driver_.make_graph(&made.graph, 0) != CUDA_SUCCESS;
    for (size_t i = 0; !failed_ && i < launches_.size(); ++i) {
      const auto node = node_of(*launches_[i], parameters);
      CUgraphNode kernel = nullptr;
      failed_ = driver_.add_kernel(&kernel, made.graph, i ? &made.kernels.back() : nullptr, i ? 1 : 0, &node) !=
          CUDA_SUCCESS;
      made.kernels.push_back(kernel);
      parameters += launches_[i]->parameters();
    }
    failed_ = failed_ || driver_.instantiate(&made.instance, made.graph, 0) != CUDA_SUCCESS;
    if (!failed_) {
      graphs_.push_back(std::move(made));
      return &graphs_.back();
    }
    if (made.graph != nullptr) {
      driver_.destroy_graph(made.graph);
    }
    return nullptr;
  }

  static constexpr size_t kGraphs = 4;
  const Driver& driver_;
  const std::vector<const Launch*> launches_;
  std::mutex mutex_;
  std::vector<Graph> graphs_;
  bool failed_ = false;  // one could not be made, and none is tried again
};

struct Block {
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

struct Round {
  std::vector<size_t> released;  // places whose memory goes back first
  std::vector<std::pair<size_t, Block>> made;
  std::optional<Launch> launch;
};

// Fresh memory on one device, the current card or the CPU. It is asked of torch's allocator itself, since torch.empty's
// way there takes as long again; but torch.empty fills it with NaN where the user wants deterministic algorithms.
class FreshMemory {
 public:
  explicit FreshMemory(c10::Device device)
      : device_(device),
        filled_(at::globalContext().deterministicAlgorithms() &&
                at::globalContext().deterministicFillUninitializedMemory()) {
    if (device.is_cuda()) {
      backend_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
      allocator_ = at::detail::getCUDAHooks().getCUDADeviceAllocator();
    } else {
      TORCH_CHECK(device.is_cpu(), "found a tensor on ", device, ", need one on a CUDA card");
    }
  }

  Tensor get(const Block& block) const {
    if (filled_) {
      return at::empty(block.shape, at::TensorOptions().device(device_).dtype(block.dtype));
    }
    return at::detail::empty_generic(block.shape, allocator_, backend_, block.dtype, std::nullopt);
  }

 private:
  c10::Device device_;
  bool filled_;
  c10::DispatchKeySet backend_{c10::DispatchKey::CPU};
  c10::Allocator* allocator_ = c10::GetAllocator(c10::DeviceType::CPU);
};

class Program {
 public:
  Program(
      const std::map<std::string, uintptr_t>& driver,
      int card,
      size_t arguments,
      size_t places,
      std::vector<Round> rounds,
      std::vector<int64_t> results)
      : driver_(driver),
        arguments_(arguments),
        places_(places),
        rounds_(std::move(rounds)),
        results_(std::move(results)) {
    std::vector<const Launch*> launches;
    bool released = false;
    for (const auto& round : rounds_) {
      released = released || !round.released.empty();
      if (round.launch) {
        launches.push_back(&*round.launch);
        parameters_ += round.launch->parameters();
      }
    }
    // What goes back between two launches may be given to another thread at once, whose work on it must come later.
    if (!released && !launches.empty()) {
      chain_ = std::make_unique<Chain>(driver_, std::move(launches));
    }
    CUdevice device = 0;
    if (driver_.device_of(&device, card) != CUDA_SUCCESS || driver_.primary_context(&home_, device) != CUDA_SUCCESS) {
      home_ = nullptr;
    }
  }

  // Results of the call on these arguments, whose forms are those recorded; undefined ones where there is none.
  Tensors run(const Tensors& arguments) const {
    TORCH_CHECK(arguments.size() == arguments_, "found ", arguments.size(), " arguments, need ", arguments_);
    const auto device = arguments[0].device();
    const FreshMemory fresh(device);
    const bool at_home = use_context();
    CUstream stream = nullptr;
    if (device.is_cuda()) {
      stream = static_cast<CUstream>(c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle());
    }
    const bool captured = is_captured(stream);
    Tensors held(places_);
    std::vector<char*> at(places_, nullptr);
    for (size_t i = 0; i < arguments_; ++i) {
      if (arguments[i].defined()) {
        at[i] = static_cast<char*>(const_cast<void*>(arguments[i].const_data_ptr()));
      }
    }
    std::vector<uint64_t> values(parameters_, 0);
    std::vector<void*> addresses(parameters_);
    for (size_t i = 0; i < parameters_; ++i) {
      addresses[i] = &values[i];
    }
    size_t filled = 0;
    for (const auto& round : rounds_) {
      for (const auto place : round.released) {
        held[place].reset();
      }
      for (const auto& [place, block] : round.made) {
        held[place] = fresh.get(block);
        at[place] = static_cast<char*>(held[place].data_ptr());
      }
      if (!round.launch) {
        continue;
      }
      const auto& launch = *round.launch;
      auto value = values.begin() + filled;
      for (const auto& pointer : launch.pointers) {
        char* start = at[pointer.tensor];
        *value++ = reinterpret_cast<uint64_t>(start == nullptr ? nullptr : start + pointer.offset);
      }
      std::copy(launch.numbers.begin(), launch.numbers.end(), value);
      if (!chain_) {
        launch_one(driver_, launch, stream, &addresses[filled]);
      }
      filled += launch.parameters();
    }
    if (chain_) {
      // Graphs are for the context that the kernels belong to: they would not stay in a green context's part of the card.
      chain_->launch(stream, addresses.data(), at_home && !captured);
    }
    Tensors results;
    results.reserve(results_.size());
    for (const auto place : results_) {
      results.push_back(place < 0 ? Tensor() : held[place]);
    }
    return results;
  }

 private:
  // Whether this thread's context is the card's primary one, torch's. A thread that has asked nothing of the card yet has
  // none, without which nothing can be launched on the default stream, and is given that one.
  bool use_context() const {
    CUcontext current = nullptr;
    if (home_ == nullptr || driver_.current_context(&current) != CUDA_SUCCESS) {
      return false;
    }
    if (current == nullptr) {
      check(driver_.set_context(home_));
      return true;
    }
    return current == home_;
  }

  // Whether work on a stream becomes a part of somebody's graph, or may.
  bool is_captured(CUstream stream) const {
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    return driver_.is_capturing(stream, &capture) != CUDA_SUCCESS || capture != CU_STREAM_CAPTURE_STATUS_NONE;
  }

  const Driver driver_;
  CUcontext home_ = nullptr;  // the card's primary context
  size_t arguments_, places_, parameters_ = 0;
  std::vector<Round> rounds_;
  std::vector<int64_t> results_;
  std::unique_ptr<Chain> chain_;  // none where kernels are launched as soon as their memory is there
};

constexpr size_t kInputs = 9;   // q, k, v, gate, beta, A_log, dt_bias, initial state, bounds
constexpr size_t kStreams = 5;  // those before A_log
constexpr size_t kKept = 7;     // tensors that the forward pass leaves for the backward pass

// One kind of call: its forward pass and, of one to be differentiated, its backward pass once that has been recorded.
// It is handed about as a tensor of one byte that owns it: of what a node may save, compiled autograd knows tensors.
class Call {
 public:
  // ``python(inputs, out, kept, d_out, d_final)`` gives the gradients of all inputs but the bounds, and what replays
  // them (or None). It is itself None where no gradients are wanted.
  static Tensor make(std::shared_ptr<Program> forward, py::object python) {
    auto* made = new Call(std::move(forward), std::move(python));
    return at::from_blob(
        made, {1}, [](void* it) { delete static_cast<Call*>(it); }, at::TensorOptions().dtype(at::kByte));
  }

  static const Call& of(const Tensor& owner) {
    return *static_cast<const Call*>(owner.const_data_ptr());
  }

  Call(std::shared_ptr<Program> forward, py::object python)
      : forward_(std::move(forward)), python_(python.release().ptr(), getPyInterpreter()) {}

  const Program& forward() const {
    return *forward_;
  }

  // The program for a backward pass of saved tensors of these forms. Hooks may bring them back in other ones.
  std::shared_ptr<Program> backward(const std::string& forms) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return forms == forms_ ? backward_ : nullptr;
  }

  // Gradients by the Python function; the program that it names is used from now on for saved tensors of these forms.
  Tensors ask_python(const Tensors& saved, const Tensors& gradients, std::optional<std::string> forms) const {
    const py::gil_scoped_acquire gil;
    try {
      const auto list = [](auto from, auto to) {
        py::list made;
        for (; from != to; ++from) {
          made.append(from->defined() ? py::cast(*from) : py::none());
        }
        return made;
      };
      const auto one = [&](size_t i) -> py::object {
        return i < gradients.size() && gradients[i].defined() ? py::cast(gradients[i]) : py::none();
      };
      const auto middle = saved.begin() + kInputs;
      const auto function = py::reinterpret_borrow<py::object>(python_.ptr(getPyInterpreter()));
      const auto answer = py::tuple(function(
          list(saved.begin(), middle), *middle, list(middle + 1, saved.end()), one(0), one(1)));
      if (forms && !answer[1].is_none()) {
        auto program = answer[1].cast<std::shared_ptr<Program>>();
        const std::lock_guard<std::mutex> lock(mutex_);
        backward_ = std::move(program);
        forms_ = std::move(*forms);
      }
      return given(answer[0].cast<std::vector<Maybe>>());
    } catch (py::error_already_set& error) {  // keep its type on the way through autograd's engine
      error.restore();
      python_error kept;
      kept.persist();
      throw kept;
    }
  }

 private:
  std::shared_ptr<Program> forward_;
  mutable std::shared_ptr<Program> backward_;
  mutable std::string forms_;  // of what `backward_` was recorded with
  mutable std::mutex mutex_;
  c10::SafePyObject python_;
};

// Whether a gradient has the form that a backward program is recorded for.
bool plain(const Tensor& gradient, const Tensor& out) {
  return gradient.defined() && readable(gradient) && gradient.scalar_type() == out.scalar_type() &&
      gradient.device() == out.device() && gradient.sizes() == out.sizes() && gradient.is_contiguous();
}

struct KDA : torch::autograd::Function<KDA> {
  static Tensors forward(
      torch::autograd::AutogradContext* ctx,
      const Maybe& call,
      const Maybe& q,
      const Maybe& k,
      const Maybe& v,
      const Maybe& gate,
      const Maybe& beta,
      const Maybe& a_log,
      const Maybe& dt_bias,
      const Maybe& state,
      const Maybe& bounds,
      const Maybe& error) {
    auto kept = given({q, k, v, gate, beta, a_log, dt_bias, state, bounds, error});
    const auto results = Call::of(*call).forward().run(kept);
    // The error word is no value to save: a hook that copies what is saved would part it from its device's.
    if (error) {
      ctx->saved_data["error"] = *error;
    }
    ctx->saved_data["call"] = *call;
    // Without its history: where a hook raises, as checkpointing's do, the list would else hold its own node for ever.
    kept.back() = results[0].detach();
    kept.insert(kept.end(), results.begin() + 2, results.end());
    ctx->save_for_backward(std::move(kept));
    ctx->set_materialize_grads(false);  // a loss on the output alone needs no zeros for the final state
    return results[1].defined() ? Tensors{results[0], results[1]} : Tensors{results[0]};
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto owner = ctx->saved_data["call"].toTensor();
    const auto& call = Call::of(owner);
    const auto& out = saved[kInputs];
    const bool final_state = gradients.size() > 1 && gradients[1].defined();
    const bool usual =
        !at::GradMode::is_enabled() && !watched() && !final_state && plain(gradients[0], out) && here(out);
    const auto forms = usual ? forms_of(saved) : std::nullopt;
    const auto program = forms ? call.backward(*forms) : nullptr;
    Tensors results;
    if (program) {
      Tensors arguments(saved.begin(), saved.begin() + kStreams);
      arguments.insert(arguments.end(), {out, gradients[0], Tensor()});  // no gradient of a final state
      arguments.insert(arguments.end(), saved.begin() + kStreams, saved.begin() + kInputs);
      const auto error = ctx->saved_data.find("error");
      arguments.push_back(error == ctx->saved_data.end() ? Tensor() : error->second.toTensor());
      arguments.insert(arguments.end(), saved.begin() + kInputs + 1, saved.end());
      results = program->run(arguments);
    } else {
      results = call.ask_python(saved, gradients, forms);
    }
    results.resize(1 + kInputs + 1);  // one for each argument of `forward`, none for bounds, error word and call
    std::rotate(results.begin(), results.end() - 1, results.end());
    return results;
  }
};

// Output, and final state or None, of the nine inputs and the error word.
std::vector<Maybe> apply(const Tensor& call, const std::vector<Maybe>& x) {
  TORCH_CHECK(x.size() == kInputs + 1, "found ", x.size(), " arguments, need ", kInputs + 1);
  const py::gil_scoped_release released;
  const auto learns = [](const Maybe& one) { return one && one->requires_grad(); };
  const bool differentiated = at::GradMode::is_enabled() && std::any_of(x.begin(), x.end(), learns);
  auto results = differentiated ? KDA::apply(Maybe(call), x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9])
                                : Call::of(call).forward().run(given(x));
  results.resize(2);
  return found(results);
}

// What a call's replay depends on in a tuple of its tensors, as bytes: forms, and whether a gradient is wanted. None
// where nothing is to be replayed: something that kernels may not read or is on another card than the current one, or
// torch's operators are watched.
py::object forms(const py::tuple& tensors) {
  if (watched()) {
    return py::none();
  }
  std::string key;
  key.reserve(1024);
  bool differentiated = false;
  for (const auto item : tensors) {
    if (item.is_none()) {
      key.push_back('-');
      continue;
    }
    if (!THPVariable_Check(item.ptr()) || !readable(THPVariable_Unpack(item.ptr()))) {
      return py::none();
    }
    const Tensor& x = THPVariable_Unpack(item.ptr());
    if (!here(x)) {
      return py::none();
    }
    append_form(key, x);
    differentiated |= x.requires_grad();
  }
  key.push_back(differentiated && at::GradMode::is_enabled() ? '+' : '-');
  return py::bytes(key);
}

}  // namespace

PYBIND11_MODULE(trine_kda_native, module) {
  py::class_<Launch>(module, "Launch")
      .def(py::init([](uintptr_t function, unsigned grid, unsigned threads, unsigned shared,
                       const std::vector<std::pair<size_t, int64_t>>& pointers, std::vector<uint64_t> numbers) {
        Launch made{reinterpret_cast<CUfunction>(function), grid, threads, shared, {}, std::move(numbers)};
        for (const auto& [tensor, offset] : pointers) {
          made.pointers.push_back({tensor, offset});
        }
        return made;
      }));
  py::class_<Round>(module, "Round")
      .def(py::init([](std::vector<size_t> released,
                       const std::vector<std::tuple<size_t, std::vector<int64_t>, at::ScalarType>>& made,
                       std::optional<Launch> launch) {
        Round round{std::move(released), {}, std::move(launch)};
        for (const auto& [place, shape, dtype] : made) {
          round.made.push_back({place, Block{shape, dtype}});
        }
        return round;
      }));
  py::class_<Program, std::shared_ptr<Program>>(module, "Program")
      .def(py::init<
           const std::map<std::string, uintptr_t>&, int, size_t, size_t, std::vector<Round>, std::vector<int64_t>>())
      .def("run", [](const Program& program, const std::vector<Maybe>& arguments) {
        const py::gil_scoped_release released;
        return found(program.run(given(arguments)));
      });
  module.def("call", &Call::make);
  module.def("apply", &apply);
  module.def("forms", &forms);
}
