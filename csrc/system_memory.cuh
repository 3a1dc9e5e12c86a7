// Accesses to memory that several GPUs of a host use at once: strong operations at system scope in PTX's memory model.
#ifndef P3D_SYSTEM_MEMORY_CUH
#define P3D_SYSTEM_MEMORY_CUH

#include <cstdint>

// Relaxed accesses; they bypass caches that another GPU's writes don't reach. Vectors have 16 bytes.
__device__ inline uint4 load_vector(const void* address) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

__device__ inline void store_vector(void* address, const uint4& value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ inline void store_relaxed(unsigned int* address, unsigned int value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline unsigned int load_relaxed(const unsigned int* address) {
  unsigned int value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// All writes of this thread, and of those that met it at __syncthreads before, are visible to a thread that reads the value
// by load_acquire.
__device__ inline void store_release(unsigned long long* address, unsigned long long value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline unsigned long long load_acquire(const unsigned long long* address) {
  unsigned long long value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline unsigned int load_acquire(const unsigned int* address) {
  unsigned int value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline unsigned long long nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

#endif
