// Memset nodes of a CUDA graph, replaced by kernels: the device takes about 4 us longer from a kernel to a memset and on.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr int kThreads = 256;
constexpr size_t kMaxBlocks = 1024;

__global__ void fill(unsigned int* to, unsigned int value, size_t size) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < size; i += step) to[i] = value;
}

using Nodes = std::vector<cudaGraphNode_t>;

// Gives the nodes before (`dependent` false) or behind a node; an error for edges of programmatic launches.
cudaError_t neighbours(cudaGraphNode_t node, bool dependent, Nodes& found) {
  const auto query = [&](cudaGraphNode_t* nodes, size_t* count) {
#if CUDART_VERSION >= 13000
    return dependent ? cudaGraphNodeGetDependentNodes(node, nodes, nullptr, count)
                     : cudaGraphNodeGetDependencies(node, nodes, nullptr, count);
#else
    return dependent ? cudaGraphNodeGetDependentNodes(node, nodes, count) : cudaGraphNodeGetDependencies(node, nodes, count);
#endif
  };
  size_t count = 0;
  if (const cudaError_t error = query(nullptr, &count); error != cudaSuccess) return error;
  found.resize(count);
  return count ? query(found.data(), &count) : cudaSuccess;
}

cudaError_t order(cudaGraph_t graph, cudaGraphNode_t first, const Nodes& later) {
  const Nodes from(later.size(), first);
#if CUDART_VERSION >= 13000
  return cudaGraphAddDependencies(graph, from.data(), later.data(), nullptr, later.size());
#else
  return cudaGraphAddDependencies(graph, from.data(), later.data(), later.size());
#endif
}

// Returns the value of an element, repeated in 32 bits.
unsigned int pattern(const cudaMemsetParams& set) {
  if (set.elementSize == 1) return (set.value & 0xffu) * 0x01010101u;
  if (set.elementSize == 2) return (set.value & 0xffffu) * 0x00010001u;
  return set.value;
}

cudaError_t replace(cudaGraph_t graph, cudaGraphNode_t node, int* replaced) {
  cudaMemsetParams set{};
  if (const cudaError_t error = cudaGraphMemsetNodeGetParams(node, &set); error != cudaSuccess) return error;
  const size_t bytes = set.width * set.elementSize;
  const auto in_words = [](uintptr_t number) { return number % sizeof(unsigned int) == 0; };
  if (set.height > 1 || bytes == 0 || !in_words(bytes) || !in_words(reinterpret_cast<uintptr_t>(set.dst))) return cudaSuccess;
  Nodes before, behind;
  if (neighbours(node, false, before) != cudaSuccess || neighbours(node, true, behind) != cudaSuccess) {
    cudaGetLastError();  // the node stays as it is
    return cudaSuccess;
  }
  auto* to = static_cast<unsigned int*>(set.dst);
  unsigned int value = pattern(set);
  size_t size = bytes / sizeof(unsigned int);
  void* arguments[] = {&to, &value, &size};
  cudaKernelNodeParams kernel{};
  kernel.func = reinterpret_cast<void*>(fill);
  kernel.gridDim = dim3(static_cast<unsigned int>(std::min((size + kThreads - 1) / kThreads, kMaxBlocks)));
  kernel.blockDim = dim3(kThreads);
  kernel.kernelParams = arguments;
  cudaGraphNode_t added{};
  cudaError_t error = cudaGraphAddKernelNode(&added, graph, before.data(), before.size(), &kernel);
  if (error == cudaSuccess && !behind.empty()) error = order(graph, added, behind);
  if (error == cudaSuccess) error = cudaGraphDestroyNode(node);
  if (error == cudaSuccess) ++*replaced;
  return error;
}

}  // namespace

// Replaces memset nodes of a graph that is not instantiated yet, those of one row and of a multiple of 4 bytes.
//
// *replaced: their number.
extern "C" int p3d_replace_memsets(void* graph, int* replaced, int device) {
  *replaced = 0;
  // Sets the device of this library's copy of the CUDA runtime.
  if (const cudaError_t error = cudaSetDevice(device); error != cudaSuccess) return error;
  const auto handle = static_cast<cudaGraph_t>(graph);
  size_t count = 0;
  if (const cudaError_t error = cudaGraphGetNodes(handle, nullptr, &count); error != cudaSuccess) return error;
  Nodes nodes(count);
  if (const cudaError_t error = cudaGraphGetNodes(handle, nodes.data(), &count); error != cudaSuccess) return error;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    if (const cudaError_t error = cudaGraphNodeGetType(node, &type); error != cudaSuccess) return error;
    if (type != cudaGraphNodeTypeMemset) continue;
    if (const cudaError_t error = replace(handle, node, replaced); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}
