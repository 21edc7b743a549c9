// y = x @ w.T for a few to a few hundred rows of x, with w packed once.
//
// w lies in panels of 32 outputs, each read from front to back while up to 12 rows of x meet it in registers; while a
// panel is used, the next is fetched from memory. That last point is where the time is: with few rows the weights'
// way from memory costs as much as the products, and a matrix library that takes one after the other waits twice.
// A row's sums are taken in the order of its inputs, whatever rows are beside it.

#include "simd.h"

namespace batchwright {
namespace {

constexpr int kVectors = 2;                  // of outputs in a panel
constexpr int kPanel = kVectors * kLanes;    // outputs in a panel
constexpr int kRows = 12;                    // rows that meet a panel at once: 24 sums, 2 weights, 1 input
constexpr int kSequential = 2;               // rows up to which the CPU, which then only reads, fetches by itself
constexpr int kChunk = 96;                   // rows that stay in a core's cache while the panels pass

// What becomes of the sums. In the last two, a panel holds 16 gates and their 16 ups, and activation(gate) * up is
// stored.
enum Mode { kStore = 0, kAdd = 1, kStoreFloat = 2, kSilu = 3, kGelu = 4 };
inline bool is_gated(int mode) { return mode >= kSilu; }

// Inputs whose products are added up before they join the sum of the ones before: the shorter, the less is lost to
// rounding. Of int8, a chain is what shares a scale.
template <class T>
constexpr int64_t kChain = std::numeric_limits<int64_t>::max();
template <>
constexpr int64_t kChain<float> = 64;
template <>
constexpr int64_t kChain<int8_t> = 64;
constexpr int64_t kGroup = kChain<int8_t>;

// Of an int8 product: how the integers become what they stand for. Inputs are stored 128 higher than they are, so the
// sums of an output's weights, times 128, are taken off beforehand.
struct Scales {
  const float *inputs;             // one per row and group of inputs
  const float *outputs;            // one per output
  const int32_t *starts;           // -128 * the sum of an output's weights, one per group and output
  int64_t groups, width;           // outputs in `starts`, whole panels
};

template <class T, int M, class X>
inline void products(const X *x, int64_t stride, int64_t from, int64_t to, const T *w, const char *next,
                     int64_t ahead, typename Lane<T>::Sums (&sums)[M][kVectors]) {
  typedef Lane<T> L;
  for (int64_t k = from; k < to; k += L::width) {
    typename L::Vector weights[kVectors];
    for (int n = 0; n < kVectors; ++n) weights[n] = load<typename L::Vector>(w + k * kPanel + n * kLanes * L::width);
    const char *line = next + k / L::width * ahead;
    if (ahead) __builtin_prefetch(line, 0, 3);
    if (ahead > 64) __builtin_prefetch(line + 64, 0, 3);
    for (int m = 0; m < M; ++m) {
      const auto inputs = L::splat(x + m * stride + k);
      for (int n = 0; n < kVectors; ++n) sums[m][n] = L::add(sums[m][n], weights[n], inputs);
    }
  }
}

// M rows meet a panel. `row`: the first of them; `panel`: the first output.
template <class T, int M, class X>
void block(const X *x, int64_t stride, int64_t inputs, const T *w, const char *next, int64_t ahead,
           const Scales *scales, int64_t row, int64_t panel, Floats (*out)[kVectors]) {
  typedef typename Lane<T>::Sums Sums;
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < kVectors; ++n) out[m][n] = Floats{};
  for (int64_t from = 0; from < inputs;) {
    const int64_t to = inputs - from > kChain<T> ? from + kChain<T> : inputs, group = from / kChain<T>;
    Sums sums[M][kVectors] = {};
    if (scales)
      for (int m = 0; m < M; ++m)
        for (int n = 0; n < kVectors; ++n)
          sums[m][n] = load<Sums>(scales->starts + group * scales->width + panel + n * kLanes);
    products<T, M>(x, stride, from, to, w, next, ahead, sums);
    for (int m = 0; m < M; ++m) {
      const float scale = scales ? scales->inputs[(row + m) * scales->groups + group] : 1;
      for (int n = 0; n < kVectors; ++n)
        out[m][n] = fused(__builtin_convertvector(sums[m][n], Floats), splat(scale), out[m][n]);
    }
    from = to;
  }
}

template <class T, class X>
void blocks(int rows, const X *x, int64_t stride, int64_t inputs, const T *w, const char *next, int64_t ahead,
            const Scales *scales, int64_t row, int64_t panel, Floats (*out)[kVectors]) {
  switch (rows) {
#define BATCHWRIGHT_CASE(M) \
  case M: return block<T, M>(x, stride, inputs, w, next, ahead, scales, row, panel, out)
    BATCHWRIGHT_CASE(1); BATCHWRIGHT_CASE(2); BATCHWRIGHT_CASE(3); BATCHWRIGHT_CASE(4);
    BATCHWRIGHT_CASE(5); BATCHWRIGHT_CASE(6); BATCHWRIGHT_CASE(7); BATCHWRIGHT_CASE(8);
    BATCHWRIGHT_CASE(9); BATCHWRIGHT_CASE(10); BATCHWRIGHT_CASE(11); BATCHWRIGHT_CASE(12);
#undef BATCHWRIGHT_CASE
  }
}

template <class Y>
struct Out {
  Y *y;
  int64_t stride, width;           // of y
  const Y *bias;                   // one per output of w, or none
  Mode mode;
  const Y *added;                  // what is added to a row's gates, then what is added to its ups; or none
  int64_t added_stride;
  const Scales *scales;
};

template <class Y>
Floats adjusted(const Out<Y> &out, Floats value, int64_t first, int count) {
  if (out.scales) value *= load<Floats>(out.scales->outputs + first);
  if (out.bias) value += read_some(out.bias + first, count);
  return value;
}

constexpr float kDoubleRoot = 1.59576912f;  // 2 * sqrt(2 / pi)

// gate / (1 + e^-slope), where the slope of SiLU is the gate. GELU, as Hendrycks and Gimpel (2016) approximate it, is
// gate * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (gate + 0.044715 * gate^3), and (1 + tanh(u)) / 2 = 1 / (1 + e^-2u).
inline Floats activated(Floats gate, Mode mode) {
  Floats slope = gate;
  if (mode == kGelu) slope = gate * fused(gate * gate, splat(kDoubleRoot * 0.044715f), splat(kDoubleRoot));
  return gate / (splat(1.0f) + exponential(-slope));
}

template <class Y>
void finish(const Out<Y> &out, const Floats *values, int64_t row, int64_t panel) {
  if (is_gated(out.mode)) {
    const int64_t first = panel * kLanes;
    const int count = out.width - first < kLanes ? int(out.width - first) : kLanes;
    Floats gate = adjusted(out, values[0], panel * kPanel, kLanes);
    Floats up = adjusted(out, values[1], panel * kPanel + kLanes, kLanes);
    if (out.added) {
      gate += read_some(out.added + row * out.added_stride + first, count);
      up += read_some(out.added + row * out.added_stride + out.width + first, count);
    }
    write_some(out.y + row * out.stride + first, activated(gate, out.mode) * up, count);
    return;
  }
  for (int n = 0; n < kVectors; ++n) {
    const int64_t first = panel * kPanel + n * kLanes;
    const int count = out.width - first < kLanes ? int(out.width - first) : kLanes;
    if (count <= 0) return;
    Floats value = adjusted(out, values[n], first, count);
    const int64_t place = row * out.stride + first;
    if (out.mode == kStoreFloat) {
      write_some(reinterpret_cast<float *>(out.y) + place, value, count);
      continue;
    }
    if (out.mode == kAdd) value += read_some(out.y + place, count);
    write_some(out.y + place, value, count);
  }
}

template <class T, class X, class Y>
void matmul(const X *x, int64_t stride, int64_t rows, int64_t inputs, const T *w, const Out<Y> &out, int64_t panels,
            int threads) {
  const int64_t chunks = (rows + kChunk - 1) / kChunk;
  const int64_t share = panels > threads ? panels / threads : 1;  // in a row: the next panel is one's own
  const int64_t shares = (panels + share - 1) / share;
#pragma omp for collapse(2) schedule(dynamic, 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t s = 0; s < shares; ++s) {
      const int64_t first = rows * chunk / chunks, count = rows * (chunk + 1) / chunks - first;
      const int64_t parts = (count + kRows - 1) / kRows;
      const int64_t end = (s + 1) * share < panels ? (s + 1) * share : panels;
      for (int64_t panel = s * share; panel < end; ++panel) {
        const T *here = w + panel * kPanel * inputs;
        const char *next = reinterpret_cast<const char *>(here + kPanel * inputs);
        const int64_t ahead = count > kSequential ? kVectors * 64 / parts : 0;
        const int64_t fetched = inputs / Lane<T>::width * ahead;
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t from = first + count * part / parts, to = first + count * (part + 1) / parts;
          Floats values[kRows][kVectors];
          blocks<T>(int(to - from), x + from * stride, stride, inputs, here, next + part * fetched, ahead, out.scales,
                    from, panel * kPanel, values);
          for (int64_t row = from; row < to; ++row) finish(out, values[row - from], row, panel);
        }
      }
    }
}

template <class T>
void pack(const T *w, int64_t outputs, int64_t inputs, T *to, int threads) {
  constexpr int width = Lane<T>::width;
#pragma omp parallel for num_threads(threads)
  for (int64_t panel = 0; panel < (outputs + kPanel - 1) / kPanel; ++panel)
    for (int64_t k = 0; k < inputs; ++k)
      for (int64_t n = 0; n < kPanel; ++n) {
        const int64_t output = panel * kPanel + n;
        to[(panel * inputs + k / width * width) * kPanel + n * width + k % width] =
            output < outputs ? w[output * inputs + k] : T{};
      }
}

// Each group of a row as 128 + a whole number of steps, the largest at 127 from 128; `scales`: what a step stands for.
template <class X>
void quantize(const X *x, int64_t stride, int64_t rows, int64_t inputs, uint8_t *to, float *scales) {
  const int64_t groups = (inputs + kGroup - 1) / kGroup;
#pragma omp for schedule(static)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t group = 0; group < groups; ++group) {
      const int64_t first = group * kGroup, count = inputs - first < kGroup ? inputs - first : kGroup;
      Floats values[kGroup / kLanes] = {}, most = {}, odd = {};
      for (int64_t i = 0; i < count; i += kLanes) {
        const int some = count - i < kLanes ? int(count - i) : kLanes;
        const Floats value = read_some(x + row * stride + first + i, some);
        most = larger(value < 0 ? -value : value, most);
        odd += value - value;  // not a number, where a value is infinite or none
        values[i / kLanes] = value;
      }
      const float size = largest(most);
      const bool whole = total(odd) == 0;
      scales[row * groups + group] = whole ? size / 127 : std::numeric_limits<float>::quiet_NaN();
      const Floats steps = splat(whole && size > 0 ? 127 / size : 0), shift = splat(12582912.0f);  // 1.5 * 2^23
      for (int64_t i = 0; i < count; i += kLanes) {
        const Floats rounded = fused(values[i / kLanes], steps, shift) - shift;
        const Ints numbers = whole ? __builtin_convertvector(rounded, Ints) + splat(128) : splat(128);
        const Bytes bytes = __builtin_convertvector(numbers, Bytes);
        std::memcpy(to + row * inputs + first + i, &bytes, count - i < kLanes ? count - i : kLanes);
      }
    }
}

int64_t panels_of(int64_t width, int mode) {
  return is_gated(mode) ? (width + kLanes - 1) / kLanes : (width + kPanel - 1) / kPanel;
}

template <class T>
void plain(const T *x, int64_t stride, int64_t rows, int64_t inputs, const T *w, const T *bias, T *y, int64_t y_stride,
           int64_t width, int mode, const T *added, int64_t added_stride, int threads) {
  const Out<T> out{y, y_stride, width, bias, Mode(mode), added, added_stride, nullptr};
#pragma omp parallel num_threads(threads)
  matmul<T>(x, stride, rows, inputs, w, out, panels_of(width, mode), threads);
}

template <class X>
void quantized(const X *x, int64_t stride, int64_t rows, int64_t inputs, const int8_t *w, const float *scales,
               const int32_t *starts, const X *bias, X *y, int64_t y_stride, int64_t width, int mode, const X *added,
               int64_t added_stride, uint8_t *workspace, float *input_scales, int threads) {
  const int64_t panels = panels_of(width, mode);
  const Scales all{input_scales, scales, starts, (inputs + kGroup - 1) / kGroup, panels * kPanel};
  const Out<X> out{y, y_stride, width, bias, Mode(mode), added, added_stride, &all};
#pragma omp parallel num_threads(threads)
  {
    quantize(x, stride, rows, inputs, workspace, input_scales);
    matmul<int8_t>(workspace, inputs, rows, inputs, w, out, panels, threads);
  }
}

}  // namespace
}  // namespace batchwright

using namespace batchwright;

extern "C" {

void pack_float32(const float *w, int64_t outputs, int64_t inputs, float *to, int threads) {
  pack(w, outputs, inputs, to, threads);
}
void pack_bfloat16(const bf16 *w, int64_t outputs, int64_t inputs, bf16 *to, int threads) {
  pack(w, outputs, inputs, to, threads);
}
void pack_int8(const int8_t *w, int64_t outputs, int64_t inputs, int8_t *to, int threads) {
  pack(w, outputs, inputs, to, threads);
}

void matmul_float32(const float *x, int64_t stride, int64_t rows, int64_t inputs, const float *w, const float *bias,
                    float *y, int64_t y_stride, int64_t width, int mode, const float *added, int64_t added_stride,
                    int threads) {
  plain(x, stride, rows, inputs, w, bias, y, y_stride, width, mode, added, added_stride, threads);
}
void matmul_bfloat16(const bf16 *x, int64_t stride, int64_t rows, int64_t inputs, const bf16 *w, const bf16 *bias,
                     bf16 *y, int64_t y_stride, int64_t width, int mode, const bf16 *added, int64_t added_stride,
                     int threads) {
  plain(x, stride, rows, inputs, w, bias, y, y_stride, width, mode, added, added_stride, threads);
}
void matmul_int8_float32(const float *x, int64_t stride, int64_t rows, int64_t inputs, const int8_t *w,
                         const float *scales, const int32_t *starts, const float *bias, float *y, int64_t y_stride,
                         int64_t width, int mode, const float *added, int64_t added_stride, uint8_t *workspace,
                         float *input_scales, int threads) {
  quantized(x, stride, rows, inputs, w, scales, starts, bias, y, y_stride, width, mode, added, added_stride,
            workspace, input_scales, threads);
}
void matmul_int8_bfloat16(const bf16 *x, int64_t stride, int64_t rows, int64_t inputs, const int8_t *w,
                          const float *scales, const int32_t *starts, const bf16 *bias, bf16 *y, int64_t y_stride,
                          int64_t width, int mode, const bf16 *added, int64_t added_stride, uint8_t *workspace,
                          float *input_scales, int threads) {
  quantized(x, stride, rows, inputs, w, scales, starts, bias, y, y_stride, width, mode, added, added_stride,
            workspace, input_scales, threads);
}

}  // extern "C"
