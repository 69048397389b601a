// SPDX-License-Identifier: Apache-2.0
// The library's log: a spdlog logger of its own, named "ddp", on standard error. Level by DDP_LOG_LEVEL, default
// "warn".
#ifndef LIBDDP_BASE_LOG_H_
#define LIBDDP_BASE_LOG_H_

#include <spdlog/logger.h>

namespace ddp {

// Created on first use. A program that registered a spdlog logger called "ddp" before gets its own used instead.
spdlog::logger& Log();

}  // namespace ddp

#endif  // LIBDDP_BASE_LOG_H_
