import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.sink.v2.DiscardingSink;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;

/**
 * Rows at a fixed rate with the time at which they were made, one shuffle, and a map that measures their age: what
 * benchmarks/pipelines/latency.py does, in Flink, with its cluster in this process.
 *
 * <p>The arguments are rows per second, seconds to warm up, seconds to measure, buckets of a decade, decades, and
 * options of Flink, each as key=value. It prints one line of JSON: the ages from 1 us on as a histogram, the greatest
 * age in us, and the number of rows.
 */
public final class Latency {
    private static volatile boolean measuring;
    private static AtomicLongArray counts;
    private static int bucketsPerDecade;
    private static final AtomicLong greatest = new AtomicLong();

    public static void main(String[] arguments) throws Exception {
        double rowsPerSecond = Double.parseDouble(arguments[0]);
        bucketsPerDecade = Integer.parseInt(arguments[3]);
        counts = new AtomicLongArray(bucketsPerDecade * Integer.parseInt(arguments[4]));
        Configuration configuration = new Configuration();
        for (int at = 5; at < arguments.length; at++) {
            String[] parts = arguments[at].split("=", 2);
            configuration.setString(parts[0], parts[1]);
        }
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.getExecutionEnvironment(configuration);
        environment
                .addSource(new Rows(rowsPerSecond), "rows", Types.TUPLE(Types.LONG, Types.LONG))
                .rebalance()
                .map(new Measure())
                .returns(Types.LONG)
                .sinkTo(new DiscardingSink<>());
        JobClient job = environment.executeAsync("latency");
        TimeUnit.MILLISECONDS.sleep((long) (Double.parseDouble(arguments[1]) * 1000));
        measuring = true;
        TimeUnit.MILLISECONDS.sleep((long) (Double.parseDouble(arguments[2]) * 1000));
        measuring = false;
        String histogram = IntStream.range(0, counts.length())
                .mapToObj(bucket -> String.valueOf(counts.get(bucket)))
                .collect(Collectors.joining(", "));
        job.cancel().get();
        System.out.println("{\"counts\": [" + histogram + "], \"max\": " + greatest.get() + "}");
        System.exit(0);
    }

    /** Each subtask makes its share of the rows when they are due, and looks ten times in a millisecond. */
    private static final class Rows extends RichParallelSourceFunction<Tuple2<Long, Long>> {
        private final double rowsPerSecond;
        private volatile boolean running = true;

        Rows(double rowsPerSecond) {
            this.rowsPerSecond = rowsPerSecond;
        }

        @Override
        public void run(SourceContext<Tuple2<Long, Long>> output) {
            double rate = rowsPerSecond / getRuntimeContext().getTaskInfo().getNumberOfParallelSubtasks();
            long begun = System.nanoTime();
            for (long row = 0; running; LockSupport.parkNanos(100_000)) {
                synchronized (output.getCheckpointLock()) {
                    for (long due = (long) ((System.nanoTime() - begun) * rate / 1e9); row < due && running; row++) {
                        output.collect(Tuple2.of(row, System.nanoTime()));
                    }
                }
            }
        }

        @Override
        public void cancel() {
            running = false;
        }
    }

    private static final class Measure implements MapFunction<Tuple2<Long, Long>, Long> {
        @Override
        public Long map(Tuple2<Long, Long> row) {
            if (measuring) {
                long age = Math.max(1, (System.nanoTime() - row.f1) / 1_000);
                int bucket = (int) (Math.log10(age) * bucketsPerDecade);
                counts.incrementAndGet(Math.min(bucket, counts.length() - 1));
                greatest.accumulateAndGet(age, Math::max);
            }
            return row.f0;
        }
    }
}
