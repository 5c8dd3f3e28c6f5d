#!/usr/bin/env bash
# Starts what the container is for, below an init that passes signals on and reaps processes. Spark starts its executors
# with the one argument `executor` and describes them in the environment; anything else is a command.
set -euo pipefail

if [[ "${1:-}" != executor ]]; then
    exec tini -s -- "$@"
fi

# SPARK_JAVA_OPT_0, SPARK_JAVA_OPT_1, …, in this order.
java_options=()
for ((number = 0; ; number++)); do
    name="SPARK_JAVA_OPT_$number"
    [[ -v "$name" ]] || break
    java_options+=("${!name}")
done

exec tini -s -- java "${java_options[@]}" \
    "-Xms$SPARK_EXECUTOR_MEMORY" "-Xmx$SPARK_EXECUTOR_MEMORY" \
    -cp "$SPARK_HOME/conf:$SPARK_HOME/jars/*" \
    org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend \
    --driver-url "$SPARK_DRIVER_URL" \
    --executor-id "$SPARK_EXECUTOR_ID" \
    --cores "$SPARK_EXECUTOR_CORES" \
    --app-id "$SPARK_APPLICATION_ID" \
    --hostname "$SPARK_EXECUTOR_POD_IP" \
    --resourceProfileId "$SPARK_RESOURCE_PROFILE_ID" \
    --podName "$SPARK_EXECUTOR_POD_NAME"
