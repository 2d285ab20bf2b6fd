// Everything whet offers to C++: include this, link whet::whet.
#ifndef WHET_WHET_H_
#define WHET_WHET_H_

#include <whet/attention.h>
#include <whet/error.h>
#include <whet/horizon.h>
#include <whet/linear_attention.h>
#include <whet/normalizer.h>
#include <whet/row.h>
#include <whet/rule.h>
#include <whet/runtime.h>
#include <whet/shard.h>
#include <whet/softmax.h>
#include <whet/view.h>

#endif  // WHET_WHET_H_
