// The gated experts of a batch, forward and backward, with the tokens of an expert kept in cache.
//
// Shapes: T tokens, E experts, D hidden, I intermediate; rows are (token, expert) pairs sorted by
// expert, `counts` of them for each. Python's version of the same is SortedExperts in network.py:
// most of its time goes to allocations and passes over memory between small products.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <tuple>

namespace {

void gather(const float* from, const int64_t* rows, int64_t n, int64_t width, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to + i * width, from + rows[i] * width, width * sizeof(float));
  }
}

void scatter_add(const float* from, const int64_t* rows, int64_t n, int64_t width, float* to) {
  for (int64_t i = 0; i < n; ++i) {
    float* target = to + rows[i] * width;
    const float* source = from + i * width;
    for (int64_t j = 0; j < width; ++j) target[j] += source[j];
  }
}

// silu(gate) * up of each row, times the row's weight where one is given.
void activate(const float* hidden, const float* weights, int64_t n, int64_t width, float* out) {
  for (int64_t i = 0; i < n; ++i) {
    const float* gate = hidden + 2 * i * width;
    const float* up = gate + width;
    const float weight = weights[i];
    for (int64_t j = 0; j < width; ++j) {
      out[i * width + j] = weight * gate[j] * up[j] / (1.0f + std::exp(-gate[j]));
    }
  }
}

std::tuple<at::Tensor, at::Tensor> forward(
    const at::Tensor& x, const at::Tensor& rows, const at::Tensor& counts,
    const at::Tensor& weights, const at::Tensor& gate_up, const at::Tensor& down) {
  const int64_t width = down.size(2), depth = x.size(1), most = counts.max().item<int64_t>();
  at::Tensor out = at::zeros_like(x), hidden = at::empty({rows.size(0), 2 * width}, x.options());
  at::Tensor x_ND = at::empty({most, depth}, x.options());
  at::Tensor active = at::empty({most, width}, x.options()), y = at::empty_like(x_ND);
  const int64_t* count = counts.data_ptr<int64_t>();
  for (int64_t e = 0, start = 0; e < counts.size(0); start += count[e++]) {
    const int64_t n = count[e];
    if (n == 0) continue;
    const int64_t* row = rows.data_ptr<int64_t>() + start;
    gather(x.data_ptr<float>(), row, n, depth, x_ND.data_ptr<float>());
    at::Tensor part = hidden.narrow(0, start, n), act = active.narrow(0, 0, n);
    at::Tensor result = y.narrow(0, 0, n);
    at::mm_out(part, x_ND.narrow(0, 0, n), gate_up[e].t());
    activate(part.data_ptr<float>(), weights.data_ptr<float>() + start, n, width,
             act.data_ptr<float>());
    at::mm_out(result, act, down[e].t());
    scatter_add(result.data_ptr<float>(), row, n, depth, out.data_ptr<float>());
  }
  return {out, hidden};
}

// From the gradient of silu(gate) * up * weight: that of the row weights, of gate and up (in
// `grad_hidden`), and the weighted activation again (in `active`).
void activate_backward(const float* hidden, const float* weights, const float* grad, int64_t n,
                       int64_t width, float* active, float* grad_hidden, float* grad_weights) {
  for (int64_t i = 0; i < n; ++i) {
    const float* gate = hidden + 2 * i * width;
    const float* up = gate + width;
    float* to_gate = grad_hidden + 2 * i * width;
    float* to_up = to_gate + width;
    const float weight = weights[i];
    float sum = 0.0f;
    for (int64_t j = 0; j < width; ++j) {
      const float sigmoid = 1.0f / (1.0f + std::exp(-gate[j]));
      const float silu = gate[j] * sigmoid, g = grad[i * width + j];
      sum += g * silu * up[j];
      active[i * width + j] = weight * silu * up[j];
      to_gate[j] = weight * g * up[j] * sigmoid * (1.0f + gate[j] * (1.0f - sigmoid));
      to_up[j] = weight * g * silu;
    }
    grad_weights[i] = sum;
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& rows, const at::Tensor& counts,
    const at::Tensor& weights, const at::Tensor& gate_up, const at::Tensor& down,
    const at::Tensor& hidden) {
  const int64_t width = down.size(2), depth = x.size(1), most = counts.max().item<int64_t>();
  at::Tensor grad_x = at::zeros_like(x), grad_weights = at::empty_like(weights);
  at::Tensor grad_gate_up = at::zeros_like(gate_up), grad_down = at::zeros_like(down);
  at::Tensor x_buffer = at::empty({most, depth}, x.options()), y_buffer = at::empty_like(x_buffer);
  at::Tensor active = at::empty({most, width}, x.options()), inner = at::empty_like(active);
  at::Tensor wide = at::empty({most, 2 * width}, x.options());
  const int64_t* count = counts.data_ptr<int64_t>();
  for (int64_t e = 0, start = 0; e < counts.size(0); start += count[e++]) {
    const int64_t n = count[e];
    if (n == 0) continue;
    const int64_t* row = rows.data_ptr<int64_t>() + start;
    at::Tensor x_ND = x_buffer.narrow(0, 0, n), grad_ND = y_buffer.narrow(0, 0, n);
    at::Tensor act = active.narrow(0, 0, n), grad_act = inner.narrow(0, 0, n);
    at::Tensor grad_hidden = wide.narrow(0, 0, n);
    at::Tensor to_down = grad_down[e], to_gate_up = grad_gate_up[e];
    gather(x.data_ptr<float>(), row, n, depth, x_ND.data_ptr<float>());
    gather(grad.data_ptr<float>(), row, n, depth, grad_ND.data_ptr<float>());
    at::mm_out(grad_act, grad_ND, down[e]);
    activate_backward(hidden.data_ptr<float>() + 2 * start * width,
                      weights.data_ptr<float>() + start, grad_act.data_ptr<float>(), n, width,
                      act.data_ptr<float>(), grad_hidden.data_ptr<float>(),
                      grad_weights.data_ptr<float>() + start);
    at::mm_out(to_down, grad_ND.t(), act);
    at::mm_out(to_gate_up, grad_hidden.t(), x_ND);
    at::mm_out(grad_ND, grad_hidden, gate_up[e]);
    scatter_add(grad_ND.data_ptr<float>(), row, n, depth, grad_x.data_ptr<float>());
  }
  return {grad_x, grad_weights, grad_gate_up, grad_down};
}

}  // namespace

TORCH_LIBRARY(train_tiny, library) {
  library.def("forward(Tensor x, Tensor rows, Tensor counts, Tensor weights, Tensor gate_up, "
              "Tensor down) -> (Tensor, Tensor)", &forward);
  library.def("backward(Tensor grad, Tensor x, Tensor rows, Tensor counts, Tensor weights, "
              "Tensor gate_up, Tensor down, Tensor hidden) -> (Tensor, Tensor, Tensor, Tensor)",
              &backward);
}
