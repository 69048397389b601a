// SPDX-License-Identifier: Apache-2.0
// Catch2, version 2.13 (Debian 12) or 3 (Ubuntu 24.04). Tests include this and nothing of Catch2 itself.
#ifndef TESTS_SUPPORT_CATCH_H_
#define TESTS_SUPPORT_CATCH_H_

#if __has_include(<catch2/catch_all.hpp>)

#include <catch2/catch_all.hpp>

namespace ddp::testing {
using Catch::Approx;
using ListenerBase = Catch::EventListenerBase;
using AssertionEndedResult = void;
}  // namespace ddp::testing

#else

#include <catch2/catch.hpp>

namespace ddp::testing {
using Approx = Catch::Detail::Approx;
#ifdef CATCH_CONFIG_EXTERNAL_INTERFACES
using ListenerBase = Catch::TestEventListenerBase;
using AssertionEndedResult = bool;
#endif
}  // namespace ddp::testing

#endif

#endif  // TESTS_SUPPORT_CATCH_H_
