// SPDX-License-Identifier: Apache-2.0
// Which version of libddp this is. CMake reads it here, too.
#ifndef DDP_VERSION_H_
#define DDP_VERSION_H_

// The first number of the version.
#define DDP_VERSION_MAJOR 0
// The second: before 1.0 another one may change the interface.
#define DDP_VERSION_MINOR 1
// The third: defects mended.
#define DDP_VERSION_PATCH 0

// The version as one number. To be compared: #if DDP_VERSION >= 200, for 0.2.0. 10000 * major + 100 * minor + patch.
#define DDP_VERSION (DDP_VERSION_MAJOR * 10000 + DDP_VERSION_MINOR * 100 + DDP_VERSION_PATCH)

#endif  // DDP_VERSION_H_
