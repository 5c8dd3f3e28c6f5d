import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.serialization.SimpleStringEncoder;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.source.util.ratelimit.RateLimiterStrategy;
import org.apache.flink.connector.datagen.source.DataGeneratorSource;
import org.apache.flink.connector.datagen.source.GeneratorFunction;
import org.apache.flink.connector.file.sink.FileSink;
import org.apache.flink.core.fs.Path;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.sink.filesystem.rollingpolicies.OnCheckpointRollingPolicy;
import org.apache.flink.util.Collector;

/**
 * Writes "key,n" for the n-th row of each of ten keys, exactly once: {@code DIRECTORY ROWS ROWS_PER_SECOND [fail]}.
 * With "fail", an update of the state throws, and the job fails when its restart strategy says so.
 */
public class NumberedRows {
    static class Numbers extends KeyedProcessFunction<Long, Long, String> {
        private final boolean fails;
        private transient ValueState<Long> count;

        Numbers(boolean fails) {
            this.fails = fails;
        }

        @Override
        public void open(OpenContext context) throws Exception {
            count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
        }

        @Override
        public void processElement(Long row, Context context, Collector<String> out) throws Exception {
            if (fails) {
                throw new IllegalStateException("asked to fail");
            }
            Long before = count.value();
            long number = before == null ? 0 : before + 1;
            count.update(number);
            out.collect(context.getCurrentKey() + "," + number);
        }
    }

    public static void main(String[] arguments) throws Exception {
        StreamExecutionEnvironment env = StreamExecutionEnvironment.getExecutionEnvironment();
        long rows = Long.parseLong(arguments[1]);
        GeneratorFunction<Long, Long> identity = row -> row;
        DataGeneratorSource<Long> source =
                new DataGeneratorSource<>(
                        identity,
                        rows,
                        RateLimiterStrategy.perSecond(Double.parseDouble(arguments[2])),
                        Types.LONG);
        env.fromSource(source, WatermarkStrategy.noWatermarks(), "numbers")
                .uid("numbers")
                .keyBy(row -> row % 10, Types.LONG)
                .process(new Numbers(arguments.length > 3 && arguments[3].equals("fail")))
                .returns(Types.STRING)
                .uid("counts")
                .sinkTo(
                        FileSink.forRowFormat(new Path(arguments[0]), new SimpleStringEncoder<String>("UTF-8"))
                                .withRollingPolicy(OnCheckpointRollingPolicy.build())
                                .build())
                .uid("files");
        env.execute();
    }
}
