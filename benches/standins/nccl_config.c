/* Parses configurations as NCCL does. */
#include "nccl.h"

#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

/* ncclConfig_t as of NCCL 2.30.7. New versions append fields. The last one took the place of padding, so the size did
 * not change. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
    int graphUsageMode, numRmaCtx, maxP2pPeers, graphStreamOrdering;
} Config;

enum { UNSET = INT_MIN };

int library_version(void) { return (int)setting("FAKE_NCCL_VERSION", 22803); }

/* Bytes of ncclConfig_t in a library of this version. */
static size_t config_size(int version) {
    return version >= 23000   ? sizeof(Config)
           : version >= 22900 ? offsetof(Config, maxP2pPeers)
           : version >= 22800 ? offsetof(Config, graphUsageMode)
           : version >= 22700 ? offsetof(Config, nChannelsPerNetPeer)
           : version >= 21700 ? offsetof(Config, commName)
                              : offsetof(Config, cgaClusterSize) + 4;
}

/* Returns 1, and prints a message, if NCCL refuses the value of a field. */
static int outside(const char *name, int value, int least, int most) {
    if (value == UNSET || (value >= least && value <= most))
        return 0;
    fprintf(stderr, "NCCL: %s is %d; it must be unset (%d) or from %d to %d\n", name, value, UNSET, least, most);
    return 1;
}

#define OUTSIDE(field, least, most) outside(#field, config.field, least, most)

/* As parseCommConfig in init.cc of NCCL 2.30.7: reads the bytes that both sides know and ignores fields that are newer
 * than the caller's version. All others must be unset or in range. */
Result parse_config(const void *given, int *blocking) {
    *blocking = 1;
    if (given == NULL)
        return SUCCESS;
    Config config = {
        0, 0, 0, UNSET, UNSET, UNSET, UNSET, NULL, UNSET, UNSET, NULL, UNSET, UNSET, UNSET, UNSET, UNSET,
        UNSET, UNSET, UNSET, UNSET, UNSET,
    };
    size_t size, known = config_size(library_version());
    memcpy(&size, given, sizeof size);
    memcpy(&config, given, size < known ? size : known);
    if (config.magic != 0xcafebeef)
        return INVALID_ARGUMENT;
    if (config.version < 21400)
        config.blocking = UNSET;
    if (config.version < 21700)
        config.cgaClusterSize = config.minCTAs = config.maxCTAs = UNSET, config.netName = NULL;
    if (config.version < 22500)
        config.trafficClass = UNSET;
    if (config.version < 22700)
        config.collnetEnable = config.CTAPolicy = config.shrinkShare = config.nvlsCTAs = UNSET;
    if (config.version < 22800)
        config.nChannelsPerNetPeer = config.nvlinkCentricSched = UNSET;
    if (config.version < 22900)
        config.graphUsageMode = config.numRmaCtx = UNSET;
    if (config.version < 23000)
        config.maxP2pPeers = UNSET;
    if (config.version < 23005 || library_version() < 23005)
        config.graphStreamOrdering = UNSET;
    trace("comm_config version=%u blocking=%d max_p2p_peers=%d graph_stream_ordering=%d", config.version,
          config.blocking, config.maxP2pPeers, config.graphStreamOrdering);
    if (OUTSIDE(blocking, 0, 1) || OUTSIDE(cgaClusterSize, 0, INT_MAX) ||
        OUTSIDE(minCTAs, 1, INT_MAX) || OUTSIDE(maxCTAs, 1, INT_MAX) ||
        config.minCTAs > config.maxCTAs || OUTSIDE(splitShare, 0, 1) ||
        OUTSIDE(collnetEnable, 0, 1) || OUTSIDE(CTAPolicy, 0, 3) ||
        OUTSIDE(shrinkShare, 0, 1) || OUTSIDE(nvlsCTAs, 1, INT_MAX) ||
        OUTSIDE(nChannelsPerNetPeer, 1, 64) || OUTSIDE(nvlinkCentricSched, 0, 1) ||
        OUTSIDE(graphUsageMode, 0, 2) || OUTSIDE(numRmaCtx, 0, INT_MAX) ||
        OUTSIDE(maxP2pPeers, 1, INT_MAX) || OUTSIDE(graphStreamOrdering, 0, 1))
        return INVALID_ARGUMENT;
    *blocking = config.blocking != 0;
    return SUCCESS;
}
