// SPDX-License-Identifier: Apache-2.0
// What the compiler reads once for all test programs. Tests include what they use all the same: lint compiles without
// this, and so does -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON.
#ifndef TESTS_SUPPORT_PRECOMPILED_H_
#define TESTS_SUPPORT_PRECOMPILED_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "ddp/ddp.h"
#include "tests/support/catch.h"

#endif  // TESTS_SUPPORT_PRECOMPILED_H_
