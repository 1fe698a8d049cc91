// The vectors of Metal: elements by name and by index, halves, and arithmetic by element.
#pragma once
#include <type_traits>

template <typename T, int N> struct vec;

template <typename T> struct vec<T, 2> {
  union {
    T elements[2];
    struct { T x, y; };
  };
  vec() = default;
  vec(T all) : vec(all, all) {}
  vec(T x, T y) : elements{x, y} {}
  template <typename From> explicit vec(vec<From, 2> from) : vec(T(from.x), T(from.y)) {}
  T& operator[](int i) { return elements[i]; }
  const T& operator[](int i) const { return elements[i]; }
};

template <typename T> struct vec<T, 3> {
  union {
    T elements[4];  // as Metal, whose vectors of 3 have the size of 4
    struct { T x, y, z; };
    vec<T, 2> xy;
  };
  vec() = default;
  vec(T all) : vec(all, all, all) {}
  vec(T x, T y, T z) : elements{x, y, z, z} {}
  T& operator[](int i) { return elements[i]; }
  const T& operator[](int i) const { return elements[i]; }
};

template <typename T> struct vec<T, 4> {
  union {
    T elements[4];
    struct { T x, y, z, w; };
    struct { vec<T, 2> xy, zw; };
  };
  vec() = default;
  vec(T all) : vec(all, all, all, all) {}
  vec(T x, T y, T z, T w) : elements{x, y, z, w} {}
  vec(vec<T, 2> xy, vec<T, 2> zw) : vec(xy.x, xy.y, zw.x, zw.y) {}
  vec(vec<T, 2> xy, T z, T w) : vec(xy.x, xy.y, z, w) {}
  template <typename From> explicit vec(vec<From, 4> from) : vec(T(from.x), T(from.y), T(from.z), T(from.w)) {}
  T& operator[](int i) { return elements[i]; }
  const T& operator[](int i) const { return elements[i]; }
};

// A number beside a vector stands for a vector of it.
#define VECTOR_OPERATOR(op)                                                                     \
  template <typename T, int N> inline vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {         \
    for (int i = 0; i < N; ++i) a[i] = T(a[i] op b[i]);                                         \
    return a;                                                                                   \
  }                                                                                             \
  template <typename T, int N>                                                                  \
  inline vec<T, N> operator op(vec<T, N> a, std::type_identity_t<T> b) {                        \
    return a op vec<T, N>(b);                                                                   \
  }                                                                                             \
  template <typename T, int N>                                                                  \
  inline vec<T, N> operator op(std::type_identity_t<T> a, vec<T, N> b) {                        \
    return vec<T, N>(a) op b;                                                                   \
  }                                                                                             \
  template <typename T, int N>                                                                  \
  inline vec<T, N>& operator op##=(vec<T, N>& a, std::type_identity_t<vec<T, N>> b) {           \
    return a = a op b;                                                                          \
  }
VECTOR_OPERATOR(+)
VECTOR_OPERATOR(-)
VECTOR_OPERATOR(*)
VECTOR_OPERATOR(/)
VECTOR_OPERATOR(&)
VECTOR_OPERATOR(|)
VECTOR_OPERATOR(^)
VECTOR_OPERATOR(<<)
VECTOR_OPERATOR(>>)
#undef VECTOR_OPERATOR

#define VECTOR_TYPES(name, T) \
  typedef vec<T, 2> name##2;  \
  typedef vec<T, 3> name##3;  \
  typedef vec<T, 4> name##4;
VECTOR_TYPES(float, float)
VECTOR_TYPES(half, half)
VECTOR_TYPES(bfloat, bfloat)
VECTOR_TYPES(int, int)
VECTOR_TYPES(uint, uint)
VECTOR_TYPES(short, short)
VECTOR_TYPES(ushort, ushort)
VECTOR_TYPES(uchar, uchar)
VECTOR_TYPES(ulong, ulong)
#undef VECTOR_TYPES
