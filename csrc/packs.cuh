// Access to tensors in vectors of 16 bytes. Tensors may begin at any address and end within a vector; staging buffers hold
// whole vectors.
#ifndef P3D_PACKS_CUH
#define P3D_PACKS_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "system_memory.cuh"

namespace {

template <typename T>
struct alignas(16) Pack {
  static constexpr int size = 16 / sizeof(T);
  T values[size];
};

__device__ float widen(float x) { return x; }
__device__ float widen(__half x) { return __half2float(x); }
__device__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ T narrow(float x);
template <>
__device__ float narrow<float>(float x) { return x; }
template <>
__device__ __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

template <typename T>
__device__ Pack<T> load_staged(const char* staging, int64_t vector) {
  const uint4 raw = load_vector(staging + vector * 16);
  return *reinterpret_cast<const Pack<T>*>(&raw);
}

template <typename T>
__device__ void store_staged(char* staging, int64_t vector, const Pack<T>& pack) {
  store_vector(staging + vector * 16, *reinterpret_cast<const uint4*>(&pack));
}

// No __restrict__: input and output may be the same memory.
template <typename T>
__device__ bool is_whole(const T* tensor, int64_t vector, int64_t size) {
  return reinterpret_cast<uintptr_t>(tensor) % 16 == 0 && (vector + 1) * Pack<T>::size <= size;
}

// Returns whether an array of `size` elements consists of whole vectors, so that it can be accessed as Whole.
template <typename T>
__device__ bool is_vectors(const T* tensor, int64_t size, int64_t multiple = Pack<T>::size) {
  return reinterpret_cast<uintptr_t>(tensor) % 16 == 0 && size % multiple == 0;
}

template <typename T, bool Whole = false>
__device__ Pack<T> load(const T* tensor, int64_t vector, int64_t size) {
  if (Whole || is_whole(tensor, vector, size)) return reinterpret_cast<const Pack<T>*>(tensor)[vector];
  Pack<T> pack;
  for (int k = 0; k < Pack<T>::size; ++k) {
    const int64_t place = vector * Pack<T>::size + k;
    pack.values[k] = place < size ? tensor[place] : narrow<T>(0.0f);
  }
  return pack;
}

template <typename T, bool Whole = false>
__device__ void store(T* tensor, int64_t vector, int64_t size, const Pack<T>& pack) {
  if (Whole || is_whole(tensor, vector, size)) {
    reinterpret_cast<Pack<T>*>(tensor)[vector] = pack;
    return;
  }
  for (int k = 0; k < Pack<T>::size; ++k) {
    const int64_t place = vector * Pack<T>::size + k;
    if (place < size) tensor[place] = pack.values[k];
  }
}

// The elements of a vector of T, in fp32.
template <typename T>
struct alignas(16) Wide {
  static constexpr int size = Pack<T>::size, packs = size / 4;
  float values[size];
};

template <typename T, bool Whole = false>
__device__ Wide<T> load_wide(const float* tensor, int64_t vector, int64_t size) {
  Wide<T> wide;
#pragma unroll
  for (int k = 0; k < Wide<T>::packs; ++k) {
    const Pack<float> part = load<float, Whole>(tensor, vector * Wide<T>::packs + k, size);
#pragma unroll
    for (int v = 0; v < 4; ++v) wide.values[4 * k + v] = part.values[v];
  }
  return wide;
}

template <typename T, bool Whole = false>
__device__ void store_wide(float* tensor, int64_t vector, int64_t size, const Wide<T>& wide) {
#pragma unroll
  for (int k = 0; k < Wide<T>::packs; ++k) {
    Pack<float> part;
#pragma unroll
    for (int v = 0; v < 4; ++v) part.values[v] = wide.values[4 * k + v];
    store<float, Whole>(tensor, vector * Wide<T>::packs + k, size, part);
  }
}

template <typename T>
__device__ Pack<T> narrowed(const Wide<T>& wide) {
  Pack<T> pack;
#pragma unroll
  for (int k = 0; k < Pack<T>::size; ++k) pack.values[k] = narrow<T>(wide.values[k]);
  return pack;
}

template <typename T>
__device__ Wide<T> widened(const Pack<T>& pack) {
  Wide<T> wide;
#pragma unroll
  for (int k = 0; k < Pack<T>::size; ++k) wide.values[k] = widen(pack.values[k]);
  return wide;
}

// Loads the elements of a vector of T from an array of fp32 or of T.
template <typename T, bool Whole = false, typename In>
__device__ Wide<T> load_values(const In* tensor, int64_t vector, int64_t size) {
  if constexpr (std::is_same_v<In, float>) {
    return load_wide<T, Whole>(tensor, vector, size);
  } else {
    return widened<T>(load<T, Whole>(tensor, vector, size));
  }
}

template <typename T, bool Whole = false, typename Out>
__device__ void store_values(Out* tensor, int64_t vector, int64_t size, const Wide<T>& values) {
  if constexpr (std::is_same_v<Out, float>) {
    store_wide<T, Whole>(tensor, vector, size, values);
  } else {
    store<T, Whole>(tensor, vector, size, narrowed<T>(values));
  }
}

}  // namespace

#endif
