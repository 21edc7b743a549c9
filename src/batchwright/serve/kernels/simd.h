// Vectors of 16 lanes, for the kernels beside this file: AVX-512 where the compiler may use it, plain C++ elsewhere.
//
// Every sum is taken lane by lane in a fixed order, and nothing here may be re-associated, so that what a kernel
// computes for one row depends on that row alone. `Lane<T>` says how values of T lie in a vector of products: a lane
// takes Lane<T>::width neighbours, which one instruction multiplies with their partners and adds to the lane's sum.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// Whatever the compiler thinks of its size: vectors that a function is called with go through memory.
#define BATCHWRIGHT_INLINE [[gnu::always_inline]] inline

namespace batchwright {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};

template <class V>
inline V load(const void *from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Floats splat(float value) { return Floats{} + value; }
inline Ints splat(int32_t value) { return Ints{} + value; }
inline Ints lane_numbers() { return Ints{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

inline float widened(bf16 value) {
  const uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
inline float widened(float value) { return value; }

inline Floats read(const float *from) { return load<Floats>(from); }

inline Floats read(const bf16 *from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#else
  Floats v;
  for (int i = 0; i < kLanes; ++i) v[i] = widened(from[i]);
  return v;
#endif
}

inline void write(float *to, Floats v) { std::memcpy(to, &v, sizeof v); }

// Rounds to the nearest, ties to even; what is not a number stays so.
inline bf16 narrowed(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline void write(bf16 *to, Floats v) {
#if defined(__AVX512BF16__)
  const auto narrow = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(to, &narrow, sizeof narrow);
#else
  for (int i = 0; i < kLanes; ++i) to[i] = narrowed(v[i]);
#endif
}

inline void put(float *to, float value) { *to = value; }
inline void put(bf16 *to, float value) { *to = narrowed(value); }

template <class T>
inline Floats read_some(const T *from, int count) {
  T all[kLanes] = {};
  std::memcpy(all, from, sizeof(T) * count);
  return read(all);
}

template <class T>
inline void write_some(T *to, Floats v, int count) {
  T all[kLanes];
  write(all, v);
  std::memcpy(to, all, sizeof(T) * count);
}

inline Floats fused(Floats a, Floats b, Floats sum) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#else
  for (int i = 0; i < kLanes; ++i) sum[i] = std::fma(a[i], b[i], sum[i]);
  return sum;
#endif
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Halves are added to halves, in the same order on every machine.
inline float total(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#endif
  float lanes[kLanes];
  write(lanes, v);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

inline float largest(Floats v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float lanes[kLanes];
  write(lanes, v);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  return lanes[0];
}

// e^v as 2^turns * (1 + rest * slope): `turns` is whole, |rest| <= ln(2) / 2, and `slope` the Taylor series of
// (e^rest - 1) / rest.
struct Powers {
  Floats turns, rest, slope;
  Ints exponent() const { return __builtin_convertvector(turns, Ints) << 23; }  // of 2^turns, as a float holds it
};

BATCHWRIGHT_INLINE Powers powers_of(Floats v) {
  const Floats shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats turns = fused(v, splat(1.44269504f), shift) - shift;
  Floats rest = fused(turns, splat(-0.693359375f), v);
  rest = fused(turns, splat(2.12194440e-4f), rest);
  constexpr float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f};
  Floats slope = splat(1.0f / 5040);
  for (const float term : terms) slope = fused(slope, rest, splat(term));
  return {turns, rest, slope};
}

// e^v to within 2 units in the last place; 0 below e^-87, where a float would be subnormal.
BATCHWRIGHT_INLINE Floats exponential(Floats v) {
  const Floats least = splat(-87.0f), most = splat(88.0f);
  const Ints vanishes = v < least;
  Floats x = v < least ? least : v;
  x = x > most ? most : x;
  const Powers powers = powers_of(x);
  const Floats scaled = (Floats)((Ints)fused(powers.slope, powers.rest, splat(1.0f)) + powers.exponent());
  const Floats all = vanishes ? Floats{} : scaled;
  return v == v ? all : v;
}

// tanh(v) to within 4 units in the last place: m / (m + 2) with m = e^2|v| - 1, which near 0 loses nothing either.
BATCHWRIGHT_INLINE Floats tangent(Floats v) {
  const Floats most = splat(20.0f);  // of 2|v|; beyond, tanh is 1
  Floats x = v < 0 ? v * splat(-2.0f) : v * splat(2.0f);
  x = x > most ? most : x;
  const Powers powers = powers_of(x);
  const Floats power = (Floats)(powers.exponent() + splat(int32_t(0x3f800000)));
  const Floats less_one = fused(power, powers.slope * powers.rest, power - splat(1.0f));
  const Floats size = less_one / (less_one + splat(2.0f));
  return v < 0 ? -size : size;
}

template <class T>
struct Lane;

template <>
struct Lane<float> {
  static constexpr int width = 1;
  typedef Floats Vector;
  typedef Floats Sums;
  static Floats splat(const float *from) { return batchwright::splat(*from); }
  static Floats add(Floats sums, Floats a, Floats b) { return fused(a, b, sums); }
};

template <>
struct Lane<bf16> {
  static constexpr int width = 2;
  typedef Ints Vector;
  typedef Floats Sums;
  static Ints splat(const bf16 *from) {
    int32_t pair;
    std::memcpy(&pair, from, 4);
    return batchwright::splat(pair);
  }
  static Floats add(Floats sums, Ints a, Ints b) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#else
    const Ints high = batchwright::splat(int32_t(0xffff0000));
    sums = fused((Floats)(a << 16), (Floats)(b << 16), sums);
    return fused((Floats)(a & high), (Floats)(b & high), sums);
#endif
  }
};

template <>
struct Lane<int8_t> {  // a: signed weights, b: unsigned activations
  static constexpr int width = 4;
  typedef Ints Vector;
  typedef Ints Sums;
  static Ints splat(const uint8_t *from) {
    int32_t four;
    std::memcpy(&four, from, 4);
    return batchwright::splat(four);
  }
  static Ints add(Ints sums, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)b, (__m512i)a);
#else
    for (int byte = 0; byte < 4; ++byte) {
      const Ints signed_part = (a << (24 - 8 * byte)) >> 24;
      sums += signed_part * ((b >> (8 * byte)) & 0xff);
    }
    return sums;
#endif
  }
};

}  // namespace batchwright
