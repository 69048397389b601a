// SPDX-License-Identifier: Apache-2.0
// All of libddp's public interface.
#ifndef DDP_DDP_H_
#define DDP_DDP_H_

#include "ddp/autocast.h"                   // IWYU pragma: export
#include "ddp/collectives.h"                // IWYU pragma: export
#include "ddp/comm_hook.h"                  // IWYU pragma: export
#include "ddp/context.h"                    // IWYU pragma: export
#include "ddp/distributed_data_parallel.h"  // IWYU pragma: export
#include "ddp/grad_scaler.h"                // IWYU pragma: export
#include "ddp/observer.h"                   // IWYU pragma: export
#include "ddp/optimizer.h"                  // IWYU pragma: export
#include "ddp/process_group.h"              // IWYU pragma: export
#include "ddp/store.h"                      // IWYU pragma: export
#include "ddp/sync_state.h"                 // IWYU pragma: export
#include "ddp/types.h"                      // IWYU pragma: export
#include "ddp/version.h"                    // IWYU pragma: export

#endif  // DDP_DDP_H_
