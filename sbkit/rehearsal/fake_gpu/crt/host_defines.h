// What CUDA's headers ask of a host compiler; nvidia-cuda-runtime doesn't ship the file of this name.
#pragma once
#define __host__
#define __device__
#define __global__
#define __managed__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define CUDARTAPI
#define CUDARTAPI_CDECL
