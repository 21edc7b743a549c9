// The highest of each row, and the first place that has it. What is not a number counts as highest.

#include "simd.h"

#include <algorithm>

namespace batchwright {
namespace {

constexpr int64_t kBlock = 1024;  // values of which only the highest is kept, until it is known where to look

inline bool beats(float value, float best) { return value > best || (value != value && best == best); }

float highest(const float *from, int64_t count) {
  Floats most = splat(-std::numeric_limits<float>::infinity()), odd = {};
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    const Floats value = read(from + i);
    most = larger(value, most);
    odd = value == value ? odd : splat(1.0f);
  }
  float best = largest(odd) > 0 ? std::numeric_limits<float>::quiet_NaN() : largest(most);
  for (int64_t i = whole; i < count; ++i)
    if (beats(from[i], best)) best = from[i];
  return best;
}

void choose(const float *row, int64_t width, float *peak, int64_t *place) {
  float best = highest(row, std::min(width, kBlock));
  int64_t first = 0;
  for (int64_t from = kBlock; from < width; from += kBlock) {
    const float value = highest(row + from, std::min(width - from, kBlock));
    if (beats(value, best)) best = value, first = from;
  }
  while (row[first] != best && !(best != best && row[first] != row[first])) ++first;
  *peak = best;
  *place = first;
}

}  // namespace
}  // namespace batchwright

extern "C" void choose_float32(const float *x, int64_t rows, int64_t width, float *peaks, int64_t *places,
                               int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < rows; ++row) batchwright::choose(x + row * width, width, peaks + row, places + row);
}
