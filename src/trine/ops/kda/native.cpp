// Recorded calls of the KDA kernels, replayed without Python, and their place in autograd's graph.
//
// A `Program` is what `triton_replay.py` has recorded of one kind of call: memory to allocate, kernels to launch on
// given places of it, results. A `Call` joins the program of a forward pass and that of its backward pass into one
// node of the graph, so that autograd's device thread runs the latter without waiting for the interpreter. A backward
// pass of any other form (a final state's gradient, strides, a graph of the graph) goes to the Python function.
//
// The module knows no CUDA header: the driver's cuLaunchKernel comes as an address, streams from torch's own interface.

#include <ATen/ops/empty.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// cuLaunchKernel: function, grid, block, bytes of shared memory, stream, parameters, extra.
using LaunchFunction =
    int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

struct Place {
  size_t tensor;   // an argument, the null pointer or a block
  int64_t offset;  // bytes
};

struct Launch {
  void* function;
  unsigned grid, threads, shared;
  std::vector<Place> pointers;
  std::vector<uint64_t> numbers;  // bit patterns, in the low bytes
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

class Program {
 public:
  Program(uintptr_t launch, size_t arguments, size_t places, std::vector<Round> rounds, std::vector<int64_t> results)
      : launch_(reinterpret_cast<LaunchFunction>(launch)),
        arguments_(arguments),
        places_(places),
        rounds_(std::move(rounds)),
        results_(std::move(results)) {}

  // Results of the call on these arguments, whose forms are those recorded; undefined ones where there is none.
  Tensors run(const Tensors& arguments) const {
    TORCH_CHECK(arguments.size() == arguments_, "found ", arguments.size(), " arguments, need ", arguments_);
    const auto device = arguments[0].device();
    const auto options = at::TensorOptions().device(device);
    void* stream = nullptr;
    if (device.is_cuda()) {
      stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
    }
    Tensors held(places_);
    std::vector<char*> at(places_, nullptr);
    for (size_t i = 0; i < arguments_; ++i) {
      if (arguments[i].defined()) {
        at[i] = static_cast<char*>(const_cast<void*>(arguments[i].const_data_ptr()));
      }
    }
    std::vector<uint64_t> values;
    std::vector<void*> parameters;
    for (const auto& round : rounds_) {
      for (const auto place : round.released) {
        held[place].reset();
      }
      for (const auto& [place, block] : round.made) {
        held[place] = at::empty(block.shape, options.dtype(block.dtype));
        at[place] = static_cast<char*>(held[place].data_ptr());
      }
      if (!round.launch) {
        continue;
      }
      const auto& launch = *round.launch;
      values.clear();
      for (const auto& pointer : launch.pointers) {
        char* start = at[pointer.tensor];
        values.push_back(reinterpret_cast<uint64_t>(start == nullptr ? nullptr : start + pointer.offset));
      }
      values.insert(values.end(), launch.numbers.begin(), launch.numbers.end());
      values.insert(values.end(), 2, 0);  // Triton's two scratch buffers, which these kernels do not have
      parameters.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) {
        parameters[i] = &values[i];
      }
      const int code = launch_(
          launch.function, launch.grid, 1, 1, launch.threads, 1, 1, launch.shared, stream, parameters.data(), nullptr);
      TORCH_CHECK(code == 0, "launching a KDA kernel failed with CUDA driver error ", code);
    }
    Tensors results;
    results.reserve(results_.size());
    for (const auto place : results_) {
      results.push_back(place < 0 ? Tensor() : held[place]);
    }
    return results;
  }

 private:
  LaunchFunction launch_;
  size_t arguments_, places_;
  std::vector<Round> rounds_;
  std::vector<int64_t> results_;
};

constexpr size_t kInputs = 9;   // q, k, v, gate, beta, A_log, dt_bias, initial state, bounds
constexpr size_t kStreams = 5;  // those before A_log
constexpr size_t kKept = 7;     // tensors that the forward pass leaves for the backward pass

// One kind of call: its forward pass and, of one to be differentiated, its backward pass once that has been recorded.
class Call : public torch::CustomClassHolder {
 public:
  // ``python(inputs, out, kept, d_out, d_final)`` gives the gradients of all inputs but the bounds, and what replays
  // them (or None). It is itself None where no gradients are wanted.
  Call(std::shared_ptr<Program> forward, py::object python)
      : forward_(std::move(forward)), python_(python.release().ptr(), getPyInterpreter()) {}

  const Program& forward() const {
    return *forward_;
  }

  std::shared_ptr<Program> backward() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return backward_;
  }

  // Gradients by the Python function; with `keep` the program that it names is used from now on.
  Tensors ask_python(const Tensors& saved, const Tensors& gradients, bool keep) const {
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
      const auto found = py::tuple(function(
          list(saved.begin(), middle), *middle, list(middle + 1, saved.end()), one(0), one(1)));
      Tensors results;
      for (const auto item : found[0]) {
        results.push_back(item.is_none() ? Tensor() : item.cast<Tensor>());
      }
      if (keep && !found[1].is_none()) {
        const std::lock_guard<std::mutex> lock(mutex_);
        backward_ = found[1].cast<std::shared_ptr<Program>>();
      }
      return results;
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
  mutable std::mutex mutex_;
  c10::SafePyObject python_;
};

// Whether a gradient has the form that a backward program is recorded for.
bool plain(const Tensor& gradient, const Tensor& out) {
  return gradient.defined() && gradient.scalar_type() == out.scalar_type() && gradient.device() == out.device() &&
      gradient.sizes() == out.sizes() && gradient.is_contiguous() && !gradient.is_neg() &&
      reinterpret_cast<uintptr_t>(gradient.const_data_ptr()) % 16 == 0;
}

using Maybe = std::optional<Tensor>;

struct KDA : torch::autograd::Function<KDA> {
  static Tensors forward(
      torch::autograd::AutogradContext* ctx,
      const c10::intrusive_ptr<Call>& call,
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
    Tensors given;
    given.reserve(kInputs + 1 + kKept);
    for (const auto* one : {&q, &k, &v, &gate, &beta, &a_log, &dt_bias, &state, &bounds, &error}) {
      given.push_back(one->value_or(Tensor()));
    }
    auto results = call->forward().run(given);
    // The error word is no value to save: a hook that copies what is saved would part it from its device's.
    ctx->saved_data["error"] = given.back();
    ctx->saved_data["call"] = c10::IValue::make_capsule(call);
    given.back() = results[0];
    given.insert(given.end(), results.begin() + 2, results.end());
    ctx->save_for_backward(std::move(given));
    ctx->set_materialize_grads(false);  // a loss on the output alone needs no zeros for the final state
    return results[1].defined() ? Tensors{results[0], results[1]} : Tensors{results[0]};
  }

  static Tensors backward(torch::autograd::AutogradContext* ctx, const Tensors& gradients) {
    const auto saved = ctx->get_saved_variables();
    const auto capsule = ctx->saved_data["call"].toCapsule();
    const auto& call = static_cast<const Call&>(*capsule);
    const auto& out = saved[kInputs];
    const bool final_state = gradients.size() > 1 && gradients[1].defined();
    const bool usual = !at::GradMode::is_enabled() && !final_state && plain(gradients[0], out);
    const auto program = usual ? call.backward() : nullptr;
    Tensors results;
    if (program) {
      Tensors given(saved.begin(), saved.begin() + kStreams);
      given.insert(given.end(), {out, gradients[0], Tensor()});
      given.insert(given.end(), saved.begin() + kStreams, saved.begin() + kInputs);
      given.push_back(ctx->saved_data["error"].toTensor());
      given.insert(given.end(), saved.begin() + kInputs + 1, saved.end());
      results = program->run(given);
    } else {
      results = call.ask_python(saved, gradients, usual);
    }
    results.resize(1 + kInputs + 1);  // one for each argument of `forward`, none for bounds, error word and call
    std::rotate(results.begin(), results.end() - 1, results.end());
    return results;
  }
};

// Output, and final state or None, of the nine inputs and the error word.
std::vector<Maybe> apply(const c10::intrusive_ptr<Call>& call, const std::vector<Maybe>& x) {
  TORCH_CHECK(x.size() == kInputs + 1, "found ", x.size(), " arguments, need ", kInputs + 1);
  const py::gil_scoped_release released;
  const auto learns = [](const Maybe& one) { return one && one->requires_grad(); };
  Tensors found;
  if (at::GradMode::is_enabled() && std::any_of(x.begin(), x.end(), learns)) {
    found = KDA::apply(call, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9]);
  } else {
    Tensors given;
    given.reserve(x.size());
    for (const auto& one : x) {
      given.push_back(one.value_or(Tensor()));
    }
    found = call->forward().run(given);
    found.resize(found[1].defined() ? 2 : 1);
  }
  return {found[0], found.size() > 1 ? Maybe(found[1]) : std::nullopt};
}

// What a call's replay depends on in a tuple of its tensors, as bytes: types, devices, shapes, strides, and whether a
// gradient is wanted. None where nothing is to be replayed: a tensor that is no plain one in memory, has a forward-mode
// tangent, begins at an address that is no multiple of 16, or lies on another card than the current one.
py::object forms(const py::tuple& tensors) {
  static const c10::DispatchKeySet special(
      {c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::FuncTorchGradWrapper,
       c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Negative, c10::DispatchKey::Conjugate});
  std::string key;
  key.reserve(1024);
  bool differentiated = false;
  const auto put = [&key](const void* from, size_t bytes) { key.append(static_cast<const char*>(from), bytes); };
  for (const auto item : tensors) {
    key.push_back(item.is_none() ? '-' : '+');
    if (item.is_none()) {
      continue;
    }
    if (!THPVariable_Check(item.ptr())) {
      return py::none();
    }
    const Tensor& x = THPVariable_Unpack(item.ptr());
    if (x.key_set().has_any(special) || x.layout() != at::kStrided || x._fw_grad(/*level=*/0).defined() ||
        reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 != 0) {
      return py::none();
    }
    const auto device = x.device();
    if (device.is_cuda() && device != c10::impl::VirtualGuardImpl(device.type()).getDevice()) {
      return py::none();
    }
    differentiated |= x.requires_grad();
    const char head[] = {
        static_cast<char>(x.scalar_type()), static_cast<char>(device.type()), static_cast<char>(device.index()),
        static_cast<char>(x.dim())};
    put(head, sizeof(head));
    put(x.sizes().data(), x.dim() * sizeof(int64_t));
    put(x.strides().data(), x.dim() * sizeof(int64_t));
  }
  key.push_back(differentiated && at::GradMode::is_enabled() ? '+' : '-');
  return py::bytes(key);
}

}  // namespace

PYBIND11_MODULE(trine_kda_native, module) {
  py::class_<Launch>(module, "Launch")
      .def(py::init([](uintptr_t function, unsigned grid, unsigned threads, unsigned shared,
                       const std::vector<std::pair<size_t, int64_t>>& pointers, std::vector<uint64_t> numbers) {
        Launch made{reinterpret_cast<void*>(function), grid, threads, shared, {}, std::move(numbers)};
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
      .def(py::init<uintptr_t, size_t, size_t, std::vector<Round>, std::vector<int64_t>>())
      .def("run", [](const Program& program, const std::vector<Maybe>& arguments) {
        Tensors given;
        given.reserve(arguments.size());
        for (const auto& one : arguments) {
          given.push_back(one.value_or(Tensor()));
        }
        std::vector<Maybe> results;
        for (auto& one : program.run(given)) {
          results.push_back(one.defined() ? Maybe(std::move(one)) : std::nullopt);
        }
        return results;
      });
  py::class_<Call, c10::intrusive_ptr<Call>>(module, "Call")
      .def(py::init<std::shared_ptr<Program>, py::object>());
  module.def("apply", &apply);
  module.def("forms", &forms);
}
