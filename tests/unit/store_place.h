// SPDX-License-Identifier: Apache-2.0
// Where a test's TCP store is: a free port, and a folder of the test's own where secrets are kept.
#ifndef TESTS_UNIT_STORE_PLACE_H_
#define TESTS_UNIT_STORE_PLACE_H_

#include <cstdlib>

#include "absl/time/time.h"
#include "ddp/store.h"
#include "tests/support/free_port.h"
#include "tests/unit/store_contract.h"

namespace ddp {

struct Place {
  Place() { setenv("XDG_RUNTIME_DIR", folder.path().c_str(), 1); }
  ~Place() { unsetenv("XDG_RUNTIME_DIR"); }

  TcpStoreOptions Options(bool serve) const {
    TcpStoreOptions options;
    options.port = port;
    options.serve = serve;
    options.run_id = "run";
    options.timeout = absl::Seconds(60);
    return options;
  }
  TcpStoreOptions Hurried() const {
    TcpStoreOptions options = Options(false);
    options.timeout = absl::Seconds(1);
    return options;
  }

  const Folder folder;
  const int port = testing::FreePort();
};

}  // namespace ddp

#endif  // TESTS_UNIT_STORE_PLACE_H_
