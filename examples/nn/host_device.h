// SPDX-License-Identifier: Apache-2.0
// Marks functions that run on the host and on GPUs.
#ifndef EXAMPLES_NN_HOST_DEVICE_H_
#define EXAMPLES_NN_HOST_DEVICE_H_

#ifdef __CUDACC__
#define NN_HOST_DEVICE __host__ __device__
#else
#define NN_HOST_DEVICE
#endif

#endif  // EXAMPLES_NN_HOST_DEVICE_H_
