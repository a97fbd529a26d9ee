// The part of the Metal Shading Language that our kernels use, as C++20 for g++ on Linux.
//
// Types, mathematics and the simdgroup functions; fibers.h runs the threads. Which rules of the
// language are modelled, and which are not, is listed in emulator.py.

#pragma once

#include <stdint.h>

#include "fibers.h"

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned long ulong;

// emulator.py rewrites `threadgroup`: it is storage on a declaration, and nothing on a pointer.
#define device
#define thread
#define constant const
#define METAL_FUNC inline
#define EMU_THREADGROUP static __attribute__((used, section("emu_threadgroup")))

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define M_PI_F 3.14159265358979323846f

// ---- scalar types -------------------------------------------------------------------------------

template <class A, class B> inline constexpr bool emu_same = false;
template <class A> inline constexpr bool emu_same<A, A> = true;

template <class To, class From> inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

// MSL converts bfloat to float by itself, but not float to bfloat: hence the explicit constructor.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T> explicit bfloat(T value) {
    float x = float(value);
    uint u = as_type<uint>(x);
    bits = x != x ? 0x7fc0 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  }
  operator float() const { return as_type<float>(uint(bits) << 16); }
  template <class T> bfloat &operator+=(T x) { return *this = bfloat(float(*this) + float(x)); }
  template <class T> bfloat &operator-=(T x) { return *this = bfloat(float(*this) - float(x)); }
  template <class T> bfloat &operator*=(T x) { return *this = bfloat(float(*this) * float(x)); }
  template <class T> bfloat &operator/=(T x) { return *this = bfloat(float(*this) / float(x)); }
};
typedef bfloat bfloat16_t;
typedef _Float16 half;
typedef _Float16 float16_t;

// bfloat op bfloat rounds to bfloat; with any other operand the built-in float operator applies.
#define EMU_BFLOAT_OPERATOR(op)                                                                    \
  template <class A, class B>                                                                      \
    requires(emu_same<A, bfloat> && emu_same<B, bfloat>)                                           \
  inline bfloat operator op(A a, B b) {                                                            \
    return bfloat(float(a) op float(b));                                                           \
  }
EMU_BFLOAT_OPERATOR(+)
EMU_BFLOAT_OPERATOR(-)
EMU_BFLOAT_OPERATOR(*)
EMU_BFLOAT_OPERATOR(/)
inline bfloat operator-(bfloat x) { return bfloat(-float(x)); }

// ---- vector types -------------------------------------------------------------------------------

#define EMU_VECTOR_INDEX(N)                                                                        \
  T &operator[](int i) { return (&x)[i]; }                                                         \
  const T &operator[](int i) const { return (&x)[i]; }                                             \
  vec() = default;                                                                                 \
  vec(T s) {                                                                                       \
    for (int i = 0; i < N; ++i) (*this)[i] = s;                                                    \
  }                                                                                                \
  template <class U> explicit vec(const vec<U, N> &other) {                                        \
    for (int i = 0; i < N; ++i) (*this)[i] = T(other[i]);                                          \
  }
template <class T, int N> struct vec;
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  EMU_VECTOR_INDEX(2)
  vec(T x, T y) : x(x), y(y) {}
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  EMU_VECTOR_INDEX(3)
  vec(T x, T y, T z) : x(x), y(y), z(z) {}
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  EMU_VECTOR_INDEX(4)
  vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
};

#define EMU_VECTOR_OPERATOR(op)                                                                    \
  template <class T, int N> inline vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {               \
    for (int i = 0; i < N; ++i) a[i] = a[i] op b[i];                                               \
    return a;                                                                                      \
  }                                                                                                \
  template <class T, int N> inline vec<T, N> operator op(vec<T, N> a, T b) {                       \
    return a op vec<T, N>(b);                                                                      \
  }                                                                                                \
  template <class T, int N> inline vec<T, N> operator op(T a, vec<T, N> b) {                       \
    return vec<T, N>(a) op b;                                                                      \
  }                                                                                                \
  template <class T, int N, class U> inline vec<T, N> &operator op##=(vec<T, N> & a, U b) {        \
    return a = a op b;                                                                             \
  }
EMU_VECTOR_OPERATOR(+)
EMU_VECTOR_OPERATOR(-)
EMU_VECTOR_OPERATOR(*)
EMU_VECTOR_OPERATOR(/)

#define EMU_VECTOR_NAMES(T, name)                                                                  \
  typedef vec<T, 2> name##2;                                                                       \
  typedef vec<T, 3> name##3;                                                                       \
  typedef vec<T, 4> name##4;
EMU_VECTOR_NAMES(float, float)
EMU_VECTOR_NAMES(half, half)
EMU_VECTOR_NAMES(bfloat, bfloat)
EMU_VECTOR_NAMES(int, int)
EMU_VECTOR_NAMES(uint, uint)
EMU_VECTOR_NAMES(ushort, ushort)
EMU_VECTOR_NAMES(uchar, uchar)

// ---- mathematics --------------------------------------------------------------------------------

// As in MSL, a function of a half is a half; MLX's bf16_math.h does the same for bfloat.
#define EMU_UNARY(name, expression)                                                                \
  inline float name(float x) { return expression; }                                                \
  inline half name(half h) { return half(name(float(h))); }                                        \
  inline bfloat name(bfloat b) { return bfloat(name(float(b))); }

namespace metal {
EMU_UNARY(exp, __builtin_expf(x))
EMU_UNARY(exp2, __builtin_exp2f(x))
EMU_UNARY(log, __builtin_logf(x))
EMU_UNARY(log2, __builtin_log2f(x))
EMU_UNARY(sin, __builtin_sinf(x))
EMU_UNARY(cos, __builtin_cosf(x))
EMU_UNARY(tanh, __builtin_tanhf(x))
EMU_UNARY(sqrt, __builtin_sqrtf(x))
EMU_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))
EMU_UNARY(floor, __builtin_floorf(x))
EMU_UNARY(ceil, __builtin_ceilf(x))
EMU_UNARY(rint, __builtin_rintf(x))
EMU_UNARY(fabs, __builtin_fabsf(x))
EMU_UNARY(abs, __builtin_fabsf(x))
inline int abs(int x) { return x < 0 ? -x : x; }
inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
// A NaN loses against a number, as with fmax and fmin.
template <class T> inline T max(T a, T b) { return a > b || b != b ? a : b; }
template <class T> inline T min(T a, T b) { return a < b || b != b ? a : b; }
template <class T> inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <class T> inline T select(T a, T b, bool take_b) { return take_b ? b : a; }
template <class T, int N> inline T dot(vec<T, N> a, vec<T, N> b) {
  T sum = a[0] * b[0];
  for (int i = 1; i < N; ++i) sum += a[i] * b[i];
  return sum;
}
namespace precise { using namespace metal; }
namespace fast { using namespace metal; }
template <class T, class U> inline constexpr bool is_same_v = emu_same<T, U>;
} // namespace metal

// ---- simdgroup and threadgroup functions --------------------------------------------------------

namespace metal {
using ::vec;

#define EMU_LINE int line = __builtin_LINE()

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

inline void threadgroup_barrier(mem_flags, EMU_LINE) { emu::threadgroup_wait(line); }
inline void simdgroup_barrier(mem_flags, EMU_LINE) {
  emu::simdgroup().meeting.wait("simdgroup_barrier", line);
}

// The tree is the ascending butterfly 1, 2, 4, 8, 16 to which simd_sum lowers on current GPUs.
template <class T> inline T simd_sum(T x, EMU_LINE) {
  auto lanes = emu::exchange(x, "simd_sum", line);
  T v[32];
  for (int i = 0; i < 32; ++i) v[i] = lanes.has(i) ? lanes.values[i] : T(0);
  for (int step = 1; step < 32; step *= 2)
    for (int i = 0; i < 32; i += 2 * step) v[i] = v[i] + v[i + step];
  return v[0];
}
template <class T, class Combine> inline T emu_fold(emu::Lanes<T> lanes, Combine combine) {
  T result = lanes.values[lanes.first()];
  for (uint i = lanes.first() + 1; i < emu::SIMD_WIDTH; ++i)
    if (lanes.has(i)) result = combine(result, lanes.values[i]);
  return result;
}
template <class T> inline T simd_product(T x, EMU_LINE) {
  return emu_fold(emu::exchange(x, "simd_product", line), [](T a, T b) { return T(a * b); });
}
template <class T> inline T simd_max(T x, EMU_LINE) {
  return emu_fold(emu::exchange(x, "simd_max", line), [](T a, T b) { return metal::max(a, b); });
}
template <class T> inline T simd_min(T x, EMU_LINE) {
  return emu_fold(emu::exchange(x, "simd_min", line), [](T a, T b) { return metal::min(a, b); });
}
inline bool simd_any(bool x, EMU_LINE) { return simd_max(int(x), line); }
inline bool simd_all(bool x, EMU_LINE) { return simd_min(int(x), line); }

// Metal leaves the value from an inactive lane undefined; here it is a run-time error.
#define EMU_SHUFFLE(name, source)                                                                  \
  template <class T> inline T name(T x, ushort n, EMU_LINE) {                                      \
    auto lanes = emu::exchange(x, #name, line);                                                    \
    uint from = source;                                                                            \
    if (!lanes.has(from))                                                                          \
      emu::fail(#name " (line %d): lane %u reads the inactive lane %u", line, emu::lane(), from);  \
    return lanes.values[from];                                                                     \
  }
EMU_SHUFFLE(simd_shuffle, n)
EMU_SHUFFLE(simd_broadcast, n)
EMU_SHUFFLE(simd_shuffle_xor, emu::lane() ^ n)
// Lanes that would read past the end keep their own value, as the language specification says.
EMU_SHUFFLE(simd_shuffle_down, emu::lane() + n < 32 ? emu::lane() + n : emu::lane())
EMU_SHUFFLE(simd_shuffle_up, emu::lane() >= n ? emu::lane() - n : emu::lane())
template <class T> inline T simd_broadcast_first(T x, EMU_LINE) {
  auto lanes = emu::exchange(x, "simd_broadcast_first", line);
  return lanes.values[lanes.first()];
}
template <class T> inline T simd_prefix_exclusive_sum(T x, EMU_LINE) {
  auto lanes = emu::exchange(x, "simd_prefix_exclusive_sum", line);
  T sum = T(0);
  for (uint i = 0; i < emu::lane(); ++i)
    if (lanes.has(i)) sum = sum + lanes.values[i];
  return sum;
}
template <class T> inline T simd_prefix_inclusive_sum(T x, EMU_LINE) {
  return simd_prefix_exclusive_sum(x, line) + x;
}
} // namespace metal
using namespace metal;

// ---- kernel attributes: MLX makes each one that the source names a parameter of the kernel ------

namespace emu {
inline uint3 vector(Triple t) { return uint3(t.x, t.y, t.z); }
inline uint3 thread_position_in_threadgroup() { return vector(fibers[current].place); }
inline uint3 threadgroup_position_in_grid() { return vector(group); }
inline uint3 threadgroups_per_grid() { return vector(n_groups); }
inline uint3 threads_per_grid() { return vector(grid); }
inline uint3 threads_per_threadgroup() { return vector(group_size); }
inline uint3 dispatch_threads_per_threadgroup() { return vector(nominal_group); }
inline uint3 thread_position_in_grid() {
  return vector(group) * vector(nominal_group) + thread_position_in_threadgroup();
}
inline uint thread_index_in_threadgroup() { return current; }
inline uint thread_index_in_simdgroup() { return lane(); }
inline uint simdgroup_index_in_threadgroup() { return current / SIMD_WIDTH; }
inline uint simdgroups_per_threadgroup() { return (n_threads + SIMD_WIDTH - 1) / SIMD_WIDTH; }
inline uint threads_per_simdgroup() { return SIMD_WIDTH; }
inline uint thread_execution_width() { return SIMD_WIDTH; }
} // namespace emu
